// Binds the kernels that read and write rows: copies, initial values, lookups and updates. Addresses are
// integers (tensor.data_ptr()). Arrays must have exactly the dtype that the docstring names, and be
// C-contiguous (TypeError otherwise). Sizes that do not fit raise ValueError.
#include "bindings/host_rows.h"
#include "bindings/unlocked.h"
#include "kernels/lookup.h"
#include "kernels/update.h"

namespace py = pybind11;

namespace tierstore {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

template <typename T>
T* Pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

template <typename T>
T* DataOr0(const std::optional<Array<T>>& array) {
  return array ? const_cast<T*>(array->data()) : nullptr;
}

HostRows View(Array<std::uint8_t> array, const std::string& weights) {
  Require(array.ndim() == 2, "rows must have the shape (n, row_bytes)");
  return HostRows(std::move(array), WeightsOf(weights));
}

void RequireRows(const HostRows& rows, const Array<std::uint8_t>& other, std::int64_t n) {
  Require(other.ndim() == 2 && other.shape(1) == rows.row_bytes() && other.shape(0) >= n,
          "the other rows must have the shape (n, row_bytes)");
}

void Move(const HostRows& self, const Array<std::int32_t>& from, const Array<std::int32_t>& to) {
  Require(from.size() == to.size(), "source and target differ in length");
  const py::gil_scoped_release release;
  MoveRows(self.Of(0), from.data(), to.data(), from.size());
}

void BindCopyRows(const HostRows& self, const Array<std::int32_t>& slots, const HostRows& rows,
                  const Array<std::int32_t>& source) {
  Require(slots.size() == source.size(), "source and slots differ in length");
  Require(self.row_bytes() == rows.row_bytes(), "the other rows are not as long");
  const py::gil_scoped_release release;
  CopyRows(self.Of(0), slots.data(), rows.Of(0), source.data(), slots.size());
}

void Initialise(const HostRows& self, const InitialValues& values,
                const std::optional<Array<std::int32_t>>& slots, const Array<std::uint64_t>& keys) {
  const Rows rows = self.Of(values.dim, values.state_floats);
  Require(!slots || slots->size() == keys.size(), "slots and keys differ in length");
  const TableInit tables = values.Tables();
  RequireTables(keys.data(), keys.size(), tables.num_tables, kNoKind);
  const py::gil_scoped_release release;
  InitRows(rows, DataOr0(slots), keys.data(), keys.size(), values.dim, values.state_floats,
           values.state_value, tables);
}

void BindCopyOut(const HostRows& self, const Array<std::int32_t>& slots, Array<std::uint8_t>& out) {
  RequireRows(self, out, slots.size());
  std::uint8_t* const to = out.mutable_data();
  const py::gil_scoped_release release;
  CopyOut(self.Of(0), slots.data(), slots.size(), to);
}

void BindCopyIn(const HostRows& self, const Array<std::int32_t>& slots, const Array<std::uint8_t>& rows,
                const std::optional<Array<std::int32_t>>& source) {
  Require(!source || source->size() == slots.size(), "source and slots differ in length");
  RequireRows(self, rows, source ? 0 : slots.size());
  const py::gil_scoped_release release;
  CopyIn(self.Of(0), slots.data(), DataOr0(source), slots.size(), rows.data());
}

Gather MakeGather(const HostRows& self, const LookupArgs& args) {
  return {self.Of(args.dim), args.dim, args.slots.data(), args.slots.size(), args.inverse.data()};
}

Bags MakeBags(const BagArgs& args, const Array<std::int32_t>& inverse) {
  const Bags bags = args.Get();
  Require(bags.num_positions() == inverse.size(), "offsets must end at the number of positions");
  return bags;
}

void BindLookupPooled(const HostRows& self, const LookupArgs& args, const BagArgs& bag_args, Address out,
                      Address weights, Address argmax) {
  const Gather gather = MakeGather(self, args);
  const Bags bags = MakeBags(bag_args, args.inverse);
  const UnlockedIfMany unlocked(args.inverse.size());
  LookupPooled(gather, bags, Pointer<const float>(weights), Pointer<float>(out),
               Pointer<std::int32_t>(argmax));
}

void BindLookupRows(const HostRows& self, const LookupArgs& args, Address out, std::int64_t out_stride) {
  const Gather gather = MakeGather(self, args);
  Require(out_stride >= args.dim, "out_stride must be at least dim");
  const UnlockedIfMany unlocked(args.inverse.size());
  LookupRows(gather, args.inverse.size(), Pointer<float>(out), out_stride);
}

void BindWeightGrads(const HostRows& self, const LookupArgs& args, const BagArgs& bag_args, Address grad,
                     Address out) {
  const Gather gather = MakeGather(self, args);
  const Bags bags = MakeBags(bag_args, args.inverse);
  const py::gil_scoped_release release;
  WeightGrads(gather, bags, Pointer<const float>(grad), Pointer<float>(out));
}

using Rounding = std::optional<RoundingArgs>;

Touched MakeTouched(const HostRows& self, const UpdateArgs& args, const Rounding& rounding) {
  Touched touched{self.Of(args.dim, args.step.StateFloats(args.dim)),
                  args.dim,
                  args.slots.data(),
                  args.slots.size(),
                  args.csr_start.data(),
                  args.csr_positions.data(),
                  {}};
  if (rounding) {
    Require(rounding->keys.size() == args.slots.size(), "rounding's keys and slots differ in length");
    touched.rounding = {rounding->keys.data(), rounding->seeds.data(), DataOr0(rounding->columns)};
  }
  return touched;
}

// Runs `update` and returns its result as an array.
template <typename Update>
Array<std::int32_t> Rejected(const UpdateArgs& args, const Update& update) {
  std::vector<std::int32_t> rows;
  {
    const UnlockedIfMany unlocked(args.csr_positions.size());
    rows = update();
  }
  return Array<std::int32_t>(static_cast<py::ssize_t>(rows.size()), rows.data());
}

Array<std::int32_t> BindUpdatePooled(const HostRows& self, const UpdateArgs& args, const BagArgs& bag_args,
                                     Address grad, Address weights, Address argmax,
                                     const Rounding& rounding) {
  const Touched touched = MakeTouched(self, args, rounding);
  const PooledGrads grads{bag_args.Get(), Pointer<const float>(weights), Pointer<const std::int32_t>(argmax),
                          Pointer<const float>(grad)};
  return Rejected(args, [&] {
    return UpdatePooled(touched, grads, args.step, args.check_finite,
                        {DataOr0(args.squares), DataOr0(args.means)});
  });
}

Array<std::int32_t> BindUpdateRows(const HostRows& self, const UpdateArgs& args, Address grad,
                                   std::int64_t grad_stride, const Rounding& rounding) {
  const Touched touched = MakeTouched(self, args, rounding);
  Require(grad_stride >= args.dim, "grad_stride must be at least dim");
  return Rejected(args, [&] {
    return UpdateRows(touched, INT32_MAX, Pointer<const float>(grad), grad_stride, args.step,
                      args.check_finite, {DataOr0(args.squares), DataOr0(args.means)});
  });
}

void BindMoves(py::class_<HostRows>& type) {
  type.def_static("view", &View, py::arg("rows").noconvert(), py::arg("weights") = "fp32",
                  "Return the rows of an array, uint8 (n, row_bytes). weights is 'fp32', 'bf16' or 'fp16'.")
      .def(py::init([](std::int64_t slots, std::int64_t row_bytes, const std::string& weights) {
             return HostRows(slots, row_bytes, WeightsOf(weights));
           }),
           py::arg("slots"), py::arg("row_bytes"), py::arg("weights") = "fp32",
           "Reserve address space for this many slots; commit() gives them memory.")
      .def_property_readonly("row_bytes", &HostRows::row_bytes)
      .def_property_readonly(
          "array", [](const py::object& self) { return self.cast<HostRows&>().ToArray(self); },
          "Return the rows of all slots, uint8 (slots, row_bytes), of which those with memory may be used.")
      .def("commit", &HostRows::Commit, py::arg("slots"), Unlocked(),
           "Give the first slots memory; new memory reads as zeros.")
      .def("discard", &HostRows::Discard, py::arg("first"), Unlocked(),
           "Give the memory of the slots from first on back to the system, until they are written again.")
      .def("move", &Move, py::arg("source").noconvert(), py::arg("target").noconvert(),
           "Copy the rows at source to target (int32[n] slots, none twice).")
      .def("copy_rows", &BindCopyRows, py::arg("slots").noconvert(), py::arg("rows"),
           py::arg("source").noconvert(),
           "Copy the row at source[i] of other rows to slots[i], for all i (int32[n]).")
      .def("initialise", &Initialise, py::arg("values"), py::arg("slots").noconvert(),
           py::arg("keys").noconvert(),
           "Write the initial records of keys (uint64[n]) at slots (int32[n], or None: 0..n-1).")
      .def("copy_out", &BindCopyOut, py::arg("slots").noconvert(), py::arg("out").noconvert(),
           "Copy the rows at slots (int32[n]) to out, uint8 (n or more, row_bytes).")
      .def("copy_in", &BindCopyIn, py::arg("slots").noconvert(), py::arg("rows").noconvert(),
           py::arg("source").noconvert() = py::none(),
           "Copy row i (or source[i], int32[n]) of rows, uint8 (m, row_bytes), to slots[i], for all i.");
}

void BindCompute(py::class_<HostRows>& type) {
  type.def("lookup_pooled", &BindLookupPooled, py::arg("args"), py::arg("bags"), py::arg("out_addr"),
           py::arg("weights_addr") = 0, py::arg("argmax_addr") = 0,
           "Pool rows over bags; see csrc/kernels/lookup.h. weights (float32[positions]) and argmax "
           "(int32[bags * dim]) are addresses, and may be 0.")
      .def("lookup_rows", &BindLookupRows, py::arg("args"), py::arg("out_addr"), py::arg("out_stride"),
           "Copy the weights of the row of position p to out + 4 * p * out_stride, zeros where p is skipped.")
      .def("weight_grads", &BindWeightGrads, py::arg("args"), py::arg("bags"), py::arg("grad_addr"),
           py::arg("out_addr"),
           "Write the derivative by every per-sample weight to out (float32[positions]); 0 for max and "
           "skipped positions.")
      .def("update_pooled", &BindUpdatePooled, py::arg("args"), py::arg("bags"), py::arg("grad_addr"),
           py::arg("weights_addr") = 0, py::arg("argmax_addr") = 0, py::arg("rounding") = py::none(),
           "Sum the gradient of every unique row over its positions, and apply one optimizer step to the row "
           "in place. Weights of 16 bits are computed in float32 and rounded: as rounding says, or to the "
           "nearest value. Returns the unique indices (int32, ascending) of rows that stay unchanged because "
           "their gradient is not finite (with check_finite only).")
      .def("update_rows", &BindUpdateRows, py::arg("args"), py::arg("grad_addr"), py::arg("grad_stride"),
           py::arg("rounding") = py::none(),
           "Do what update_pooled does for lookups of rows one by one: the gradient of position p is at grad "
           "+ "
           "4 * p * grad_stride.");
}

}  // namespace

TIERSTORE_BINDINGS(rows) {
  py::register_exception<AddressSpaceError>(m, "AddressSpaceError", PyExc_RuntimeError);
  BindRowArguments(m);
  BindRowCodec(m);
  py::class_<HostRows> type(m, "HostRows",
                            "Rows of row_bytes bytes in host memory, addressed by slot: weights, optimizer "
                            "state, zero padding.");
  BindMoves(type);
  BindConversions(type);
  BindCompute(type);
}

}  // namespace tierstore
