// Python bindings of what sharded collections do to the ids of a batch before they exchange them.
#include "bindings/registry.h"
#include "kernels/divide.h"

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// Hands the vector's memory over to numpy.
Array<std::int64_t> Owned(std::vector<std::int64_t>&& values) {
  auto* kept = new std::vector<std::int64_t>(std::move(values));
  const py::capsule owner(kept, [](void* p) { delete static_cast<std::vector<std::int64_t>*>(p); });
  return Array<std::int64_t>(static_cast<py::ssize_t>(kept->size()), kept->data(), owner);
}

py::tuple BindDivideByRows(std::uintptr_t ids_addr, bool is_int32, std::int64_t count,
                           const Array<std::int64_t>& lengths, const Array<std::int64_t>& starts) {
  const tierstore::Bagged batch{reinterpret_cast<const void*>(ids_addr), is_int32, count, lengths.data(),
                                lengths.size()};
  tierstore::Divided divided;
  {
    py::gil_scoped_release release;
    divided = tierstore::DivideByRows(batch, starts.data(), starts.size());
  }
  return py::make_tuple(Owned(std::move(divided.ids)), Owned(std::move(divided.lengths)),
                        Owned(std::move(divided.positions)));
}

}  // namespace

TIERSTORE_BINDINGS(exchange) {
  m.def("divide_by_rows", &BindDivideByRows, py::arg("ids_addr"), py::arg("is_int32"), py::arg("count"),
        py::arg("lengths").noconvert(), py::arg("starts").noconvert(),
        "Divide ids (int64 or int32[count]) in bags of lengths (int64) among shards that begin at starts "
        "(int64, ascending): (ids int64[count] by shard, lengths int64[shards * bags], positions "
        "int64[count]). Raises ValueError for lengths or ids that do not fit.");
}
