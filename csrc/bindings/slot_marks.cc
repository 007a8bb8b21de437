// Binds the marks of slots, which tell for which operations of a GPU a row must wait.
#include "cache/slot_marks.h"

#include <vector>

#include "bindings/arrays.h"
#include "bindings/registry.h"

namespace py = pybind11;

namespace tierstore {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

std::vector<std::int64_t> Listed(const SlotMarks::Newest& newest) { return {newest.begin(), newest.end()}; }

std::vector<std::int64_t> Touch(SlotMarks& self, const Array<std::int32_t>& slots, std::int64_t mark) {
  const py::gil_scoped_release release;
  return Listed(self.Touch(slots.data(), slots.size(), mark));
}

std::vector<std::int64_t> Newest(const SlotMarks& self, std::int64_t first) {
  const py::gil_scoped_release release;
  return Listed(self.From(first));
}

}  // namespace

TIERSTORE_BINDINGS(slot_marks) {
  py::class_<SlotMarks>(m, "SlotMarks",
                        "The last operation of a GPU on each of some slots; see csrc/cache/slot_marks.h.")
      .def(py::init<std::int64_t>(), py::arg("most"))
      .def("grow", &SlotMarks::Grow, py::arg("slots"), Unlocked(), "Let the first slots have marks.")
      .def("touch", &Touch, py::arg("slots").noconvert(), py::arg("mark"),
           "Give slots (int32[n], none twice) a mark; with 0 the slots keep their marks. Returns the newest "
           "mark of each stream that the slots had, 0 for none.")
      .def("newest", &Newest, py::arg("first"),
           "Return the newest mark of each stream among the slots from first on.");
}

}  // namespace tierstore
