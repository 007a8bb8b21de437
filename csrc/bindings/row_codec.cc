// Binds the conversions between the rows of the first tier and encoded rows of lower tiers.
#include <algorithm>
#include <iterator>

#include "bindings/host_rows.h"

namespace py = pybind11;

namespace tierstore {
namespace {

constexpr const char* kWeightNames[] = {"fp32", "bf16", "fp16", "int8"};  // in the order of WeightType

// Returns the wide rows of this format in `rows`.
Rows WideRows(const HostRows& rows, const RowFormat& format) {
  const Rows wide = rows.Of(format.dim, format.state_floats);
  Require(wide.weights == WeightType::kFloat32, "only rows with float32 weights have encoded forms");
  return wide;
}

void RequireEncoded(const RowCodec& codec, const Array<std::uint8_t>& rows, std::int64_t n) {
  Require(rows.ndim() == 2 && rows.shape(1) == codec.format.row_bytes() && rows.shape(0) >= n,
          "encoded rows must have the shape (n, codec.row_bytes)");
}

std::int64_t Encode(const HostRows& self, const RowCodec& codec, const Array<std::uint64_t>& keys,
                    Array<std::uint8_t>& out, const std::optional<Array<std::int32_t>>& slots) {
  const std::int64_t n = keys.size();
  Require(!slots || slots->size() == n, "slots and keys differ in length");
  RequireEncoded(codec, out, n);
  TableSeeds tables{nullptr, 0};
  if (codec.seeds) {
    tables = {codec.seeds->data(), codec.seeds->size()};
    RequireTables(keys.data(), n, tables.num_tables, kNoSeed);
  }
  const Rows rows = WideRows(self, codec.format);
  std::uint8_t* const to = out.mutable_data();
  const py::gil_scoped_release release;
  return EncodeRows(rows, slots ? slots->data() : nullptr, keys.data(), n, codec.format, tables, to);
}

void Decode(const HostRows& self, const RowCodec& codec, const Array<std::uint8_t>& rows,
            const std::optional<Array<std::int32_t>>& slots,
            const std::optional<Array<std::int32_t>>& source) {
  Require(!slots || !source || slots->size() == source->size(), "source and slots differ in length");
  RequireEncoded(codec, rows, slots && !source ? slots->size() : 0);
  const std::int64_t n = slots ? slots->size() : source ? source->size() : rows.shape(0);
  const Rows to = WideRows(self, codec.format);
  const py::gil_scoped_release release;
  DecodeRows(to, slots ? slots->data() : nullptr, source ? source->data() : nullptr, n, codec.format,
             rows.data());
}

}  // namespace

WeightType WeightsOf(const std::string& name) {
  const auto* const found = std::find(std::begin(kWeightNames), std::end(kWeightNames), name);
  Require(found != std::end(kWeightNames), "weights must be 'fp32', 'bf16', 'fp16' or 'int8'");
  return static_cast<WeightType>(found - std::begin(kWeightNames));
}

RowCodec RowCodec::Make(const std::string& weights, const std::string& state, std::int64_t dim,
                        std::int64_t state_floats, std::optional<Array<std::uint64_t>> seeds) {
  Require(dim >= 1 && state_floats >= 0, "dim must be at least 1 and state_floats at least 0");
  Require(state == "fp32" || state == "bf16", "state must be 'fp32' or 'bf16'");
  return {{WeightsOf(weights), state == "bf16", seeds.has_value(), dim, state_floats}, std::move(seeds)};
}

void BindRowCodec(py::module_& m) {
  py::class_<RowCodec>(
      m, "RowCodec",
      "Rows in fewer bytes (csrc/kernels/row_format.h): weights are 'fp32', 'bf16', 'fp16' or "
      "'int8', and state is 'fp32' or 'bf16'. seeds has a uint64 per table (key >> 48) for "
      "stochastic rounding; with None, rounding is to the nearest value.")
      .def(py::init([](const std::string& weights, const std::string& state, std::int64_t dim,
                       std::int64_t state_floats, const std::optional<Array<std::uint64_t>>& seeds) {
             return RowCodec::Make(weights, state, dim, state_floats, seeds);
           }),
           py::kw_only(), py::arg("weights"), py::arg("state"), py::arg("dim"), py::arg("state_floats"),
           py::arg("seeds").noconvert() = py::none())
      .def_property_readonly(
          "row_bytes", [](const RowCodec& codec) { return codec.format.row_bytes(); },
          "The bytes of an encoded row, a multiple of 16.");
}

void BindConversions(py::class_<HostRows>& type) {
  type.def("encode", &Encode, py::arg("codec"), py::arg("keys").noconvert(), py::arg("out").noconvert(),
           py::arg("slots").noconvert() = py::none(),
           "Write the encoded row of keys[i] (uint64[n]), which is at slots[i] (int32[n], or None: i), to "
           "out[i], uint8 (n or more, codec.row_bytes). Returns the first i whose row int8 cannot hold, or "
           "-1.")
      .def("decode", &Decode, py::arg("codec"), py::arg("rows").noconvert(),
           py::arg("slots").noconvert() = py::none(), py::arg("source").noconvert() = py::none(),
           "Write encoded row source[i] (int32[n], or None: i) of rows, uint8 (m, codec.row_bytes), to "
           "slots[i] (int32[n], or None: i), for all i.");
}

}  // namespace tierstore
