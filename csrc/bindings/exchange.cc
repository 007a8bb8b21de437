// Binds the functions that check and divide the ids of a batch before sharded collections exchange the ids.
#include "bindings/arrays.h"
#include "bindings/registry.h"
#include "kernels/divide.h"

namespace py = pybind11;

namespace {

using tierstore::Array;
using tierstore::Owned;

template <typename Wire>
py::tuple Divide(const tierstore::Bagged& batch, const Array<std::int64_t>& starts) {
  tierstore::Divided<Wire> divided;
  {
    py::gil_scoped_release release;
    divided = tierstore::DivideByRows<Wire>(batch, starts.data(), starts.size());
  }
  return py::make_tuple(Owned(std::move(divided.ids)), Owned(std::move(divided.lengths)),
                        Owned(std::move(divided.positions)), Owned(std::move(divided.ends)));
}

py::tuple BindDivideByRows(std::uintptr_t ids_addr, bool is_int32, std::int64_t count,
                           const Array<std::int64_t>& lengths, const Array<std::int64_t>& starts,
                           bool as_int32) {
  const tierstore::Bagged batch{
      {reinterpret_cast<const void*>(ids_addr), is_int32, count}, lengths.data(), lengths.size()};
  return as_int32 ? Divide<std::int32_t>(batch, starts) : Divide<std::int64_t>(batch, starts);
}

using Bounded = std::tuple<std::uintptr_t, bool, std::int64_t, std::int64_t>;

py::tuple BindFirstOutside(const std::vector<Bounded>& features) {
  py::gil_scoped_release release;
  for (std::size_t f = 0; f < features.size(); ++f) {
    const auto& [address, is_int32, count, bound] = features[f];
    const std::int64_t at =
        tierstore::FirstOutside({reinterpret_cast<const void*>(address), is_int32, count}, bound);
    if (at >= 0) {
      py::gil_scoped_acquire acquire;
      return py::make_tuple(f, at);
    }
  }
  py::gil_scoped_acquire acquire;
  return py::make_tuple(-1, -1);
}

}  // namespace

TIERSTORE_BINDINGS(exchange) {
  m.def("divide_by_rows", &BindDivideByRows, py::arg("ids_addr"), py::arg("is_int32"), py::arg("count"),
        py::arg("lengths").noconvert(), py::arg("starts").noconvert(), py::arg("as_int32"),
        "Divide ids (int64 or int32[count]) in bags of lengths (int64) among shards that begin at starts "
        "(int64, ascending). Returns (ids [count] by shard, lengths [shards * bags], positions int64[count], "
        "ends int64[shards] of the shards' ids); ids and lengths are int32 if as_int32, else int64. Raises "
        "ValueError for lengths or ids that do not fit.");
  m.def("first_outside", &BindFirstOutside, py::arg("features"),
        "Find the first id outside [0, bound). Returns (number of its feature, its position), or (-1, -1) if "
        "there is none. features has (address, is_int32, count, bound) of each feature.");
}
