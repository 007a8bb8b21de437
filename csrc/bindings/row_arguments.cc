// Checks the argument structs of the kernels when they are made, and binds their Python classes.
#include <algorithm>

#include "bindings/host_rows.h"
#include "bindings/shared_offsets.h"

namespace py = pybind11;

namespace tierstore {

InitialValues InitialValues::Checked() && {
  Require(dim >= 1 && state_floats >= 0, "dim must be at least 1 and state_floats at least 0");
  Require(first.size() == kinds.size() && second.size() == kinds.size() && seeds.size() == kinds.size(),
          "kinds, first, second and seeds differ in length");
  Require(!columns || columns->size() == kinds.size(), "columns and kinds differ in length");
  for (py::ssize_t t = 0; t < kinds.size(); ++t) {
    Require(kinds.data()[t] <= static_cast<std::uint8_t>(InitKind::kNormal),
            "kinds must be 0 (constant), 1 (uniform) or 2 (normal)");
  }
  return std::move(*this);
}

TableInit InitialValues::Tables() const {
  return {reinterpret_cast<const InitKind*>(kinds.data()),
          first.data(),
          second.data(),
          seeds.data(),
          kinds.size(),
          columns ? columns->data() : nullptr};
}

BagArgs BagArgs::Checked() && {
  Require(offsets.size() >= 1, "offsets needs one entry more than there are bags");
  Require(bag_start.size() == modes.size() + 1, "bag_start needs one entry more than modes");
  Require(out_offset.size() == modes.size() && out_stride.size() == modes.size(),
          "out_offset, out_stride and modes differ in length");
  Require(offsets.size() - 1 <= INT32_MAX, "more than 2^31 - 1 bags in one lookup");
  return std::move(*this);
}

Bags BagArgs::Get() const {
  return {offsets.data(),
          offsets.size() - 1,
          bag_start.data(),
          modes.size(),
          out_offset.data(),
          out_stride.data(),
          reinterpret_cast<const Pooling*>(modes.data())};
}

bool BagArgs::TakesMax() const {
  return std::count(modes.data(), modes.data() + modes.size(), static_cast<std::uint8_t>(Pooling::kMax)) > 0;
}

BagArgs BagArgs::WithStride(std::int64_t stride) const {
  BagArgs bags = *this;
  bags.out_stride = Array<std::int64_t>(out_stride.size());
  std::fill_n(bags.out_stride.mutable_data(), out_stride.size(), stride);
  return bags;
}

LookupArgs LookupArgs::Checked() && {
  Require(dim >= 1, "dim must be at least 1");
  Require(inverse.size() <= INT32_MAX, "more than 2^31 - 1 positions in one lookup");
  return std::move(*this);
}

UpdateArgs UpdateArgs::Checked() && {
  Require(dim >= 1, "dim must be at least 1");
  Require(csr_start.size() == slots.size() + 1, "csr_start needs one entry more than slots");
  Require(csr_start.data()[slots.size()] == csr_positions.size(), "csr_start must end at len(csr_positions)");
  Require(!squares || squares->size() == slots.size(), "squares and slots differ in length");
  if (squares) squares->mutable_data();  // throws unless it may be written to
  Require(!means || means->size() == slots.size(), "means and slots differ in length");
  return std::move(*this);
}

RoundingArgs RoundingArgs::Checked() && {
  Require(!columns || columns->size() == seeds.size(), "columns and seeds differ in length");
  RequireTables(keys.data(), keys.size(), seeds.size(), kNoSeed);
  bool columns_begin = true;
  for (py::ssize_t t = 0; columns && t < columns->size(); ++t) columns_begin &= columns->data()[t] >= 0;
  Require(columns_begin, "columns must be at least 0");
  return std::move(*this);
}

namespace {

void BindOptimizerStep(py::module_& m) {
  py::class_<OptimizerStep>(
      m, "OptimizerStep",
      "Hyperparameters of one optimizer step. Kinds are 0 SGD, 1 RowWiseAdagrad, 2 Adagrad, 3 Adam, 4 "
      "Momentum, 5 Nesterov, 6 Lars, 7 Lamb, 8 PartialRowWiseAdam and 9 PartialRowWiseLamb; "
      "weight_decay_mode is 0 (none), 1 (L2) or 2 (decoupled); the first step is 1. For kinds 4 and 5, beta1 "
      "is the momentum and beta2 the dampening; for kind 6, beta1 is the momentum.")
      .def(py::init(&OptimizerStep::Make), py::kw_only(), py::arg("kind"), py::arg("lr"),
           py::arg("eps") = 0.0, py::arg("weight_decay") = 0.0, py::arg("weight_decay_mode") = 0,
           py::arg("beta1") = 0.0, py::arg("beta2") = 0.0, py::arg("step") = 1)
      .def("state_floats", &OptimizerStep::StateFloats, py::arg("dim"))
      .def(
          "clipped", &OptimizerStep::Clipped, py::arg("norm"), py::arg("value"),
          "Return the same step of gradients that are clipped, by value and then by the row's norm; infinity "
          "does not clip.")
      .def("decaying_all", &OptimizerStep::DecayingAll, py::arg("keep_missed"),
           "Return the same step, with weight decay of all rows: a row that was not part of the last n "
           "updates is multiplied by keep_missed^n. The row's state has one float more.")
      .def_property_readonly("kind", [](const OptimizerStep& step) { return static_cast<int>(step.kind); })
      .def_readonly("lr", &OptimizerStep::lr)
      .def_readonly("eps", &OptimizerStep::eps)
      .def_readonly("l2", &OptimizerStep::l2)
      .def_readonly("keep", &OptimizerStep::keep)
      .def_readonly("decay", &OptimizerStep::decay)
      .def_readonly("beta1", &OptimizerStep::beta1)
      .def_readonly("beta2", &OptimizerStep::beta2)
      .def_readonly("rest1", &OptimizerStep::rest1)
      .def_readonly("rest2", &OptimizerStep::rest2)
      .def_readonly("adam_lr", &OptimizerStep::adam_lr)
      .def_readonly("adam_inv_sqrt_v", &OptimizerStep::adam_inv_sqrt_v)
      .def_readonly("clip_value", &OptimizerStep::clip_value)
      .def_readonly("clip_norm", &OptimizerStep::clip_norm)
      .def_readonly("number", &OptimizerStep::number)
      .def_readonly("decays_all", &OptimizerStep::decays_all)
      .def_readonly("keep_missed", &OptimizerStep::keep_missed);
}

void BindInitialValues(py::module_& m) {
  py::class_<InitialValues>(
      m, "InitialValues",
      "The values with which the rows of each table (key >> 48) begin: dim weights, state_floats times "
      "state_value, zero padding. kinds (uint8), the parameters first and second (float32) and seeds "
      "(uint64) "
      "have one entry per table. Kinds are 0 constant (value), 1 uniform (low, high) and 2 normal (mean, "
      "standard deviation). columns (int64) has the first column of each table that is a part of a wider "
      "table.")
      .def(
          py::init([](std::int64_t dim, std::int64_t state_floats, float state_value,
                      const Array<std::uint8_t>& kinds, const Array<float>& first, const Array<float>& second,
                      const Array<std::uint64_t>& seeds, const std::optional<Array<std::int64_t>>& columns) {
            return InitialValues{dim, state_floats, state_value, kinds, first, second, seeds, columns}
                .Checked();
          }),
          py::kw_only(), py::arg("dim"), py::arg("state_floats"), py::arg("state_value"),
          py::arg("kinds").noconvert(), py::arg("first").noconvert(), py::arg("second").noconvert(),
          py::arg("seeds").noconvert(), py::arg("columns").noconvert() = py::none())
      .def_readonly("dim", &InitialValues::dim)
      .def_readonly("state_floats", &InitialValues::state_floats)
      .def_readonly("state_value", &InitialValues::state_value)
      .def_readonly("kinds", &InitialValues::kinds)
      .def_readonly("first", &InitialValues::first)
      .def_readonly("second", &InitialValues::second)
      .def_readonly("seeds", &InitialValues::seeds)
      .def_readonly("columns", &InitialValues::columns);
}

void BindLookupArguments(py::module_& m) {
  m.def(
      "is_shared", &AreShared, py::arg("offsets"),
      "Whether these are offsets of bags with one id each, which all such batches share and nobody changes.");
  py::class_<BagArgs>(m, "Bags",
                      "Bags grouped by feature (csrc/kernels/bags.h). offsets (int64) has one entry more "
                      "than there are bags, "
                      "bag_start (int64) one entry more than features; out_offset and out_stride are int64, "
                      "and modes (uint8) "
                      "0 sum, 1 mean or 2 max.")
      .def(py::init([](const Array<std::int64_t>& offsets, const Array<std::int64_t>& bag_start,
                       const Array<std::int64_t>& out_offset, const Array<std::int64_t>& out_stride,
                       const Array<std::uint8_t>& modes) {
             return BagArgs{offsets, bag_start, out_offset, out_stride, modes}.Checked();
           }),
           py::kw_only(), py::arg("offsets").noconvert(), py::arg("bag_start").noconvert(),
           py::arg("out_offset").noconvert(), py::arg("out_stride").noconvert(), py::arg("modes").noconvert())
      .def(
          "check", [](const BagArgs& bags) { bags.Get(); },
          "Raise ValueError unless offsets and bag_start begin at 0, never fall, and agree in their ends.")
      .def_readonly("offsets", &BagArgs::offsets)
      .def_readonly("bag_start", &BagArgs::bag_start)
      .def_readonly("out_offset", &BagArgs::out_offset)
      .def_readonly("out_stride", &BagArgs::out_stride)
      .def_readonly("modes", &BagArgs::modes)
      .def_property_readonly(
          "arrays",
          [](const BagArgs& bags) {
            return py::make_tuple(bags.offsets, bags.bag_start, bags.out_offset, bags.out_stride, bags.modes);
          },
          "The arrays of the bags, in the order of the constructor.")
      .def_property_readonly(
          "own_bytes",
          [](const BagArgs& bags) {
            return AreShared(bags.offsets) ? py::ssize_t{0} : bags.offsets.nbytes();
          },
          "The bytes of offsets that no other batch shares.")
      .def_property_readonly("takes_max", &BagArgs::TakesMax, "Whether a feature has max pooling.")
      .def("with_stride", &BagArgs::WithStride, py::arg("stride"),
           "Return the same bags, whose vectors lie stride floats apart.");
  py::class_<LookupArgs>(m, "LookupArgs",
                         "Position p reads the dim weights of the row at slots[inverse[p]] (both int32); "
                         "inverse[p] < 0 skips position p.")
      .def(py::init(
               [](std::int64_t dim, const Array<std::int32_t>& slots, const Array<std::int32_t>& inverse) {
                 return LookupArgs{dim, slots, inverse}.Checked();
               }),
           py::kw_only(), py::arg("dim"), py::arg("slots").noconvert(), py::arg("inverse").noconvert())
      .def_readonly("dim", &LookupArgs::dim)
      .def_readonly("slots", &LookupArgs::slots)
      .def_readonly("inverse", &LookupArgs::inverse);
}

void BindUpdateArguments(py::module_& m) {
  py::class_<UpdateArgs>(
      m, "UpdateArgs",
      "One optimizer step for the rows at slots (int32, no repeats). csr_start and csr_positions (int32, of "
      "build_csr) say which positions use each row. With check_finite, rows whose gradient is not finite "
      "stay unchanged. Two arguments serve RowWiseAdagrad and PartialRowWiseAdam of rows that are cut by "
      "columns: with squares (float32 per slot) no row is updated, and squares gets the sums of the squared "
      "gradients; means (float32 per slot) has the mean squares over all columns.")
      .def(py::init([](std::int64_t dim, const Array<std::int32_t>& slots,
                       const Array<std::int32_t>& csr_start, const Array<std::int32_t>& csr_positions,
                       const OptimizerStep& step, bool check_finite,
                       const std::optional<Array<float>>& squares, const std::optional<Array<float>>& means) {
             return UpdateArgs{dim, slots, csr_start, csr_positions, step, check_finite, squares, means}
                 .Checked();
           }),
           py::kw_only(), py::arg("dim"), py::arg("slots").noconvert(), py::arg("csr_start").noconvert(),
           py::arg("csr_positions").noconvert(), py::arg("step"), py::arg("check_finite") = false,
           py::arg("squares").noconvert() = py::none(), py::arg("means").noconvert() = py::none())
      .def_readonly("dim", &UpdateArgs::dim)
      .def_readonly("slots", &UpdateArgs::slots)
      .def_readonly("csr_start", &UpdateArgs::csr_start)
      .def_readonly("csr_positions", &UpdateArgs::csr_positions)
      .def_readonly("step", &UpdateArgs::step)
      .def_readonly("check_finite", &UpdateArgs::check_finite)
      .def_readonly("squares", &UpdateArgs::squares)
      .def_readonly("means", &UpdateArgs::means);
  py::class_<RoundingArgs>(
      m, "UpdateRounding",
      "Stochastic rounding of updated weights of 16 bits, a pure function of the table's "
      "seed, the id, the column and the step's number. keys (uint64) has the key of each "
      "slot. seeds (uint64) and columns (int64) have an entry per table (key >> 48); "
      "columns has the first column of each table that is a part of a wider table.")
      .def(py::init([](const Array<std::uint64_t>& keys, const Array<std::uint64_t>& seeds,
                       const std::optional<Array<std::int64_t>>& columns) {
             return RoundingArgs{keys, seeds, columns}.Checked();
           }),
           py::kw_only(), py::arg("keys").noconvert(), py::arg("seeds").noconvert(),
           py::arg("columns").noconvert() = py::none())
      .def_readonly("keys", &RoundingArgs::keys)
      .def_readonly("seeds", &RoundingArgs::seeds)
      .def_readonly("columns", &RoundingArgs::columns);
}

}  // namespace

void BindRowArguments(py::module_& m) {
  BindOptimizerStep(m);
  BindInitialValues(m);
  BindLookupArguments(m);
  BindUpdateArguments(m);
}

}  // namespace tierstore
