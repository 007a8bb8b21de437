#include "bindings/shared_offsets.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

namespace py = pybind11;

namespace tierstore {
namespace {

constexpr const char* kName = "tierstore.offsets";
constexpr std::size_t kLeast = 1 << 12;

using Numbers = PageVector<std::int64_t>;

}  // namespace

Array<std::int64_t> SharedOffsets(py::ssize_t n) {
  // The owner is never freed, since there may be no interpreter any more when the process ends. Arrays that
  // were given out keep the numbers that they were given, of which there were too few for this call.
  static py::capsule* const owner = new py::capsule;
  const auto wanted = static_cast<std::size_t>(n), most = static_cast<std::size_t>(kMostShared);
  const auto* numbers = *owner ? owner->get_pointer<Numbers>() : nullptr;
  if (numbers == nullptr || numbers->size() < wanted) {
    const std::size_t twice = numbers == nullptr ? kLeast : 2 * numbers->size();
    auto more = std::make_unique<Numbers>(std::max(wanted, std::min(twice, most)));
    std::iota(more->begin(), more->end(), std::int64_t{0});
    numbers = more.get();
    *owner = py::capsule(more.release(), kName, [](void* at) { delete static_cast<Numbers*>(at); });
  }
  Array<std::int64_t> offsets(n, numbers->data(), *owner);
  py::detail::array_proxy(offsets.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return offsets;
}

bool AreShared(const py::array& offsets) {
  const py::object base = offsets.base();
  if (!base || !PyCapsule_CheckExact(base.ptr())) return false;
  const char* const name = PyCapsule_GetName(base.ptr());
  return name != nullptr && std::strcmp(name, kName) == 0;
}

}  // namespace tierstore
