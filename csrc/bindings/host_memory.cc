// Binds memory of the host that a GPU is to read and write in place.
#include <algorithm>

#include "bindings/registry.h"
#include "cache/reserved_memory.h"
#include "common/thread_pool.h"

namespace py = pybind11;

namespace tierstore {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kPagesAtOnce = 512;

class HostMemory {
 public:
  explicit HostMemory(std::size_t bytes) : memory_(bytes) {}
  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(memory_.data()); }
  // Touches the pages, too, by all threads: the driver, which locks the pages, would touch them one by one.
  void Commit(std::size_t bytes) {
    const std::size_t before = memory_.committed();
    memory_.Commit(bytes);
    const auto begin = static_cast<std::int64_t>(before) / kPage;
    const auto end = static_cast<std::int64_t>(std::min(bytes, memory_.committed()) / kPage);
    volatile std::byte* const data = memory_.data();
    ParallelFor(begin, std::max(begin, end), kPagesAtOnce, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t page = first; page < last; ++page) data[page * kPage] = std::byte{0};
    });
  }

 private:
  ReservedMemory memory_;
};

}  // namespace

TIERSTORE_BINDINGS(host_memory) {
  py::class_<HostMemory>(
      m, "HostMemory",
      "Address space of the host; committed memory lies in huge pages. A forked child does "
      "not have this memory.")
      .def(py::init<std::size_t>(), py::arg("bytes"))
      .def_property_readonly("address", &HostMemory::address)
      .def("commit", &HostMemory::Commit, py::arg("bytes"), py::call_guard<py::gil_scoped_release>(),
           "Give the first bytes memory, zeros at first. Raises AddressSpaceError.");
}

}  // namespace tierstore
