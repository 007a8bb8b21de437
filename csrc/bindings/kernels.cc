// Python bindings of csrc/kernels. Addresses are integers (tensor.data_ptr()); arrays must have exactly the
// dtype named in the docstring and be C-contiguous (TypeError otherwise); sizes that do not fit raise
// ValueError.
#include <optional>
#include <stdexcept>
#include <string>

#include "bindings/arrays.h"
#include "bindings/registry.h"
#include "common/key.h"
#include "common/thread_pool.h"
#include "kernels/csr.h"
#include "kernels/init.h"
#include "kernels/isa.h"
#include "kernels/lookup.h"
#include "kernels/normal.h"
#include "kernels/optimizer.h"
#include "kernels/rows.h"
#include "kernels/update.h"

namespace py = pybind11;

namespace tierstore {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;
using Address = std::uintptr_t;

template <typename T>
T* Pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

void Require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

Rows MakeRows(Address base, std::int64_t row_bytes, std::int64_t floats) {
  Require(row_bytes > 0 && row_bytes % 16 == 0, "row_bytes must be a positive multiple of 16");
  Require(4 * floats <= row_bytes, "row_bytes is smaller than the weights and optimizer state of a row");
  return {Pointer<std::uint8_t>(base), row_bytes};
}

template <typename T>
Array<T> ToArray(const std::vector<T>& values) {
  return Array<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// ---------------------------------------------------------------------------------------------------- rows

void BindInitRows(Address base, std::int64_t row_bytes, const std::optional<Array<std::int32_t>>& slots,
                  const Array<std::uint64_t>& keys, std::int64_t dim, std::int64_t state_floats,
                  float state_value, const Array<std::uint8_t>& kinds, const Array<float>& a,
                  const Array<float>& b, const Array<std::uint64_t>& seeds,
                  const std::optional<Array<std::int64_t>>& columns) {
  Require(dim >= 1 && state_floats >= 0, "dim must be at least 1 and state_floats at least 0");
  const Rows rows = MakeRows(base, row_bytes, dim + state_floats);
  Require(!slots || slots->size() == keys.size(), "slots and keys differ in length");
  Require(a.size() == kinds.size() && b.size() == kinds.size() && seeds.size() == kinds.size(),
          "kinds, a, b and seeds differ in length");
  Require(!columns || columns->size() == kinds.size(), "columns and kinds differ in length");
  for (py::ssize_t t = 0; t < kinds.size(); ++t) {
    Require(kinds.data()[t] <= static_cast<std::uint8_t>(InitKind::kNormal),
            "kinds must be 0 (constant), 1 (uniform) or 2 (normal)");
  }
  for (py::ssize_t i = 0; i < keys.size(); ++i) {
    Require(KeyTable(keys.data()[i]) < kinds.size(), "a key's table has no entry in kinds");
  }
  const TableInit tables{reinterpret_cast<const InitKind*>(kinds.data()),
                         a.data(),
                         b.data(),
                         seeds.data(),
                         kinds.size(),
                         columns ? columns->data() : nullptr};
  py::gil_scoped_release release;
  InitRows(rows, slots ? slots->data() : nullptr, keys.data(), keys.size(), dim, state_floats, state_value,
           tables);
}

void BindCopyOut(Address base, std::int64_t row_bytes, const Array<std::int32_t>& slots, Address to) {
  const Rows rows = MakeRows(base, row_bytes, 0);
  py::gil_scoped_release release;
  CopyOut(rows, slots.data(), slots.size(), Pointer<std::uint8_t>(to));
}

void BindCopyIn(Address base, std::int64_t row_bytes, const Array<std::int32_t>& slots, Address from,
                const std::optional<Array<std::int32_t>>& src_index) {
  const Rows rows = MakeRows(base, row_bytes, 0);
  Require(!src_index || src_index->size() == slots.size(), "src_index and slots differ in length");
  py::gil_scoped_release release;
  CopyIn(rows, slots.data(), src_index ? src_index->data() : nullptr, slots.size(),
         Pointer<const std::uint8_t>(from));
}

// -------------------------------------------------------------------------------------------- lookup, update

py::tuple BindBuildCsr(const Array<std::int32_t>& inverse, std::int64_t num_unique) {
  Require(num_unique >= 0 && num_unique <= INT32_MAX, "num_unique must fit int32");
  Require(inverse.size() <= INT32_MAX, "more than 2^31 - 1 positions in one lookup");
  Array<std::int32_t> start = Fresh<std::int32_t>(num_unique + 1);
  std::int32_t* starts = start.mutable_data();
  {
    py::gil_scoped_release release;
    CountPositions(inverse.data(), inverse.size(), num_unique, starts);
  }
  Array<std::int32_t> positions = Fresh<std::int32_t>(starts[num_unique]);
  std::int32_t* to = positions.mutable_data();
  {
    py::gil_scoped_release release;
    PlacePositions(inverse.data(), inverse.size(), num_unique, starts, to);
  }
  return py::make_tuple(start, positions);
}

Gather MakeGather(Address base, std::int64_t row_bytes, std::int64_t dim, const Array<std::int32_t>& slots,
                  const Array<std::int32_t>& inverse) {
  Require(dim >= 1, "dim must be at least 1");
  Require(inverse.size() <= INT32_MAX, "more than 2^31 - 1 positions in one lookup");
  return {MakeRows(base, row_bytes, dim), dim, slots.data(), slots.size(), inverse.data()};
}

Bags MakeBags(const Array<std::int64_t>& offsets, const Array<std::int64_t>& bag_start,
              const Array<std::int64_t>& out_offset, const Array<std::int64_t>& out_stride,
              const Array<std::uint8_t>& modes) {
  Require(offsets.size() >= 1, "offsets needs one entry more than there are bags");
  Require(bag_start.size() == modes.size() + 1, "bag_start needs one entry more than modes");
  Require(out_offset.size() == modes.size() && out_stride.size() == modes.size(),
          "out_offset, out_stride and modes differ in length");
  Require(offsets.size() - 1 <= INT32_MAX, "more than 2^31 - 1 bags in one lookup");
  const Bags bags{offsets.data(),
                  offsets.size() - 1,
                  bag_start.data(),
                  modes.size(),
                  out_offset.data(),
                  out_stride.data(),
                  reinterpret_cast<const Pooling*>(modes.data())};
  bags.Check();
  return bags;
}

void RequirePositions(const Bags& bags, std::int64_t n) {
  Require(bags.num_positions() == n, "offsets must end at the number of positions");
}

void BindLookupPooled(Address base, std::int64_t row_bytes, std::int64_t dim,
                      const Array<std::int32_t>& slots, const Array<std::int32_t>& inverse,
                      const Array<std::int64_t>& offsets, const Array<std::int64_t>& bag_start,
                      const Array<std::int64_t>& out_offset, const Array<std::int64_t>& out_stride,
                      const Array<std::uint8_t>& modes, Address weights, Address out, Address argmax) {
  const Gather gather = MakeGather(base, row_bytes, dim, slots, inverse);
  const Bags bags = MakeBags(offsets, bag_start, out_offset, out_stride, modes);
  RequirePositions(bags, inverse.size());
  py::gil_scoped_release release;
  LookupPooled(gather, bags, Pointer<const float>(weights), Pointer<float>(out),
               Pointer<std::int32_t>(argmax));
}

void BindLookupRows(Address base, std::int64_t row_bytes, std::int64_t dim, const Array<std::int32_t>& slots,
                    const Array<std::int32_t>& inverse, Address out, std::int64_t out_stride) {
  const Gather gather = MakeGather(base, row_bytes, dim, slots, inverse);
  Require(out_stride >= dim, "out_stride must be at least dim");
  py::gil_scoped_release release;
  LookupRows(gather, inverse.size(), Pointer<float>(out), out_stride);
}

void BindWeightGrads(Address base, std::int64_t row_bytes, std::int64_t dim, const Array<std::int32_t>& slots,
                     const Array<std::int32_t>& inverse, const Array<std::int64_t>& offsets,
                     const Array<std::int64_t>& bag_start, const Array<std::int64_t>& out_offset,
                     const Array<std::int64_t>& out_stride, const Array<std::uint8_t>& modes, Address grad,
                     Address out) {
  const Gather gather = MakeGather(base, row_bytes, dim, slots, inverse);
  const Bags bags = MakeBags(offsets, bag_start, out_offset, out_stride, modes);
  RequirePositions(bags, inverse.size());
  py::gil_scoped_release release;
  WeightGrads(gather, bags, Pointer<const float>(grad), Pointer<float>(out));
}

Touched MakeTouched(Address base, std::int64_t row_bytes, std::int64_t dim, const OptimizerStep& step,
                    const Array<std::int32_t>& slots, const Array<std::int32_t>& csr_start,
                    const Array<std::int32_t>& csr_positions) {
  Require(dim >= 1, "dim must be at least 1");
  Require(csr_start.size() == slots.size() + 1, "csr_start needs one entry more than slots");
  Require(csr_start.data()[slots.size()] == csr_positions.size(), "csr_start must end at len(csr_positions)");
  return {MakeRows(base, row_bytes, dim + step.StateFloats(dim)),
          dim,
          slots.data(),
          slots.size(),
          csr_start.data(),
          csr_positions.data()};
}

RowSquares MakeSquares(Address out, Address means) {
  return {Pointer<float>(out), Pointer<const float>(means)};
}

Array<std::int32_t> BindUpdatePooled(Address base, std::int64_t row_bytes, std::int64_t dim,
                                     const Array<std::int32_t>& slots, const Array<std::int32_t>& csr_start,
                                     const Array<std::int32_t>& csr_positions,
                                     const Array<std::int64_t>& offsets, const Array<std::int64_t>& bag_start,
                                     const Array<std::int64_t>& out_offset,
                                     const Array<std::int64_t>& out_stride, const Array<std::uint8_t>& modes,
                                     Address weights, Address argmax, Address grad, const OptimizerStep& step,
                                     bool check_finite, Address squares, Address means) {
  const Touched touched = MakeTouched(base, row_bytes, dim, step, slots, csr_start, csr_positions);
  const PooledGrads grads{MakeBags(offsets, bag_start, out_offset, out_stride, modes),
                          Pointer<const float>(weights), Pointer<const std::int32_t>(argmax),
                          Pointer<const float>(grad)};
  std::vector<std::int32_t> rejected;
  {
    py::gil_scoped_release release;
    rejected = UpdatePooled(touched, grads, step, check_finite, MakeSquares(squares, means));
  }
  return ToArray(rejected);
}

Array<std::int32_t> BindUpdateRows(Address base, std::int64_t row_bytes, std::int64_t dim,
                                   const Array<std::int32_t>& slots, const Array<std::int32_t>& csr_start,
                                   const Array<std::int32_t>& csr_positions, Address grad,
                                   std::int64_t grad_stride, const OptimizerStep& step, bool check_finite,
                                   Address squares, Address means) {
  const Touched touched = MakeTouched(base, row_bytes, dim, step, slots, csr_start, csr_positions);
  Require(grad_stride >= dim, "grad_stride must be at least dim");
  std::vector<std::int32_t> rejected;
  {
    py::gil_scoped_release release;
    rejected = UpdateRows(touched, INT32_MAX, Pointer<const float>(grad), grad_stride, step, check_finite,
                          MakeSquares(squares, means));
  }
  return ToArray(rejected);
}

// ------------------------------------------------------------------------------------------- run-time
// choices

constexpr const char* kIsaNames[] = {"baseline", "avx2", "avx512"};

void ForceIsaByName(const std::string& name) {
  if (name == "auto") return ForceIsa(BestIsa());
  for (int i = 0; i < 3; ++i) {
    if (name == kIsaNames[i]) return ForceIsa(static_cast<Isa>(i));
  }
  throw std::invalid_argument("isa must be 'auto', 'baseline', 'avx2' or 'avx512'");
}

std::vector<std::string> SupportedIsas() { return {kIsaNames, kIsaNames + static_cast<int>(BestIsa()) + 1}; }

}  // namespace

TIERSTORE_BINDINGS(kernels) {
  py::class_<OptimizerStep>(
      m, "OptimizerStep",
      "Hyperparameters of one optimizer step (kind: 0 SGD, 1 RowWiseAdagrad, 2 Adagrad, "
      "3 Adam; weight_decay_mode: 0 none, 1 L2, 2 decoupled; step counts from 1).")
      .def(py::init(&OptimizerStep::Make), py::arg("kind"), py::arg("lr"), py::arg("eps") = 0.0,
           py::arg("weight_decay") = 0.0, py::arg("weight_decay_mode") = 0, py::arg("beta1") = 0.0,
           py::arg("beta2") = 0.0, py::arg("step") = 1)
      .def("state_floats", &OptimizerStep::StateFloats, py::arg("dim"));

  const auto array = [](const char* name) { return py::arg(name).noconvert(); };

  m.def("init_rows", &BindInitRows, py::arg("rows_addr"), py::arg("row_bytes"), py::arg("slots").noconvert(),
        array("keys"), py::arg("dim"), py::arg("state_floats"), py::arg("state_value"), array("kinds"),
        array("a"), array("b"), array("seeds"), py::arg("columns").noconvert() = py::none(),
        "Write the initial records of keys (uint64[n]) at slots (int32[n], or None: 0..n-1). kinds (uint8), "
        "a, b "
        "(float32) and seeds (uint64) have one entry per table (key >> 48): 0 constant a, 1 uniform [a, b), "
        "2 normal with mean a and standard deviation b. columns (int64): the first column of each table, if "
        "it is a part of a wider one.");
  m.def("copy_out", &BindCopyOut, py::arg("rows_addr"), py::arg("row_bytes"), array("slots"),
        py::arg("out_addr"), "Copy whole rows at slots (int32[n]) to n * row_bytes contiguous bytes.");
  m.def("copy_in", &BindCopyIn, py::arg("rows_addr"), py::arg("row_bytes"), array("slots"),
        py::arg("src_addr"), py::arg("src_index").noconvert() = py::none(),
        "Copy row i (or src_index[i], int32[n]) of a contiguous buffer to slots[i], for all i.");
  m.def("build_csr", &BindBuildCsr, array("inverse"), py::arg("num_unique"),
        "(start int32[num_unique + 1], positions int32[m]): the positions of every unique row, ascending; "
        "entries of "
        "inverse (int32[n]) below 0 are left out.");

  m.def(
      "lookup_pooled", &BindLookupPooled, py::arg("rows_addr"), py::arg("row_bytes"), py::arg("dim"),
      array("slots"), array("inverse"), array("offsets"), array("bag_start"), array("out_offset"),
      array("out_stride"), array("modes"), py::arg("weights_addr"), py::arg("out_addr"),
      py::arg("argmax_addr") = 0,
      "Pool rows slots[inverse[p]] over bags (offsets int64) grouped by feature (bag_start, out_offset, "
      "out_stride "
      "int64, modes uint8: 0 sum, 1 mean, 2 max); see csrc/kernels/lookup.h. weights (float32[n]) and argmax "
      "(int32[n_bags * dim]) may be 0.");
  m.def(
      "lookup_rows", &BindLookupRows, py::arg("rows_addr"), py::arg("row_bytes"), py::arg("dim"),
      array("slots"), array("inverse"), py::arg("out_addr"), py::arg("out_stride"),
      "Copy the weights of rows slots[inverse[p]] to out + 4 * p * out_stride; zeros where inverse[p] < 0.");
  m.def("weight_grads", &BindWeightGrads, py::arg("rows_addr"), py::arg("row_bytes"), py::arg("dim"),
        array("slots"), array("inverse"), array("offsets"), array("bag_start"), array("out_offset"),
        array("out_stride"), array("modes"), py::arg("grad_addr"), py::arg("out_addr"),
        "Write the derivative by every per-sample weight to out (float32[n]); 0 for max and skipped "
        "positions.");
  m.def("update_pooled", &BindUpdatePooled, py::arg("rows_addr"), py::arg("row_bytes"), py::arg("dim"),
        array("slots"), array("csr_start"), array("csr_positions"), array("offsets"), array("bag_start"),
        array("out_offset"), array("out_stride"), array("modes"), py::arg("weights_addr"),
        py::arg("argmax_addr"), py::arg("grad_addr"), py::arg("step"), py::arg("check_finite") = false,
        py::arg("squares_addr") = 0, py::arg("means_addr") = 0,
        "Sum the gradient of every unique row over its positions and apply one optimizer step to it, in "
        "place. Returns "
        "the unique indices (int32, ascending) left alone because their gradient is not finite (check_finite "
        "only). For RowWiseAdagrad of rows cut by columns: with squares (float32 per unique row) nothing is "
        "updated, only "
        "the sums of the squared gradients are written there; means are the mean squares over all columns.");
  m.def("update_rows", &BindUpdateRows, py::arg("rows_addr"), py::arg("row_bytes"), py::arg("dim"),
        array("slots"), array("csr_start"), array("csr_positions"), py::arg("grad_addr"),
        py::arg("grad_stride"), py::arg("step"), py::arg("check_finite") = false, py::arg("squares_addr") = 0,
        py::arg("means_addr") = 0,
        "update_pooled for sequence lookups: the gradient of position p is at grad + 4 * p * grad_stride.");

  m.def("num_threads", &NumThreads, "Threads that one kernel may use.");
  m.def("set_num_threads", &SetNumThreads, py::arg("n"),
        "Let every kernel use at most n threads (results stay).");
  m.def(
      "isa", [] { return std::string(kIsaNames[static_cast<int>(ActiveIsa())]); },
      "The instruction set in use: 'baseline', 'avx2' or 'avx512'.");
  m.def("supported_isas", &SupportedIsas, "The instruction sets that this CPU has.");
  m.def("force_isa", &ForceIsaByName, py::arg("name"),
        "For tests: use this instruction set ('auto': the best one).");
}

}  // namespace tierstore
