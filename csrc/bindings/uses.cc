// Binds the classes that tell when a lookup is over: each lookup has a Use, and Uses collects the lookups
// that are over. Dropping a Use ends its lookup, wherever the garbage collector runs. No Python code runs
// meanwhile, which a signal could interrupt. The interpreter's lock guards all of it.
#include <list>
#include <memory>
#include <utility>

#include "bindings/registry.h"

namespace py = pybind11;

namespace tierstore {
namespace {

using Over = std::list<std::pair<std::int64_t, py::object>>;

class Use {
 public:
  Use(std::shared_ptr<Over> over, std::int64_t seq, py::object slots) : over_(std::move(over)) {
    own_.emplace_back(seq, std::move(slots));
  }
  ~Use() { Release(); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

  void Release() noexcept { over_->splice(over_->end(), own_); }
  bool held() const { return !own_.empty(); }

 private:
  std::shared_ptr<Over> over_;
  Over own_;  // one item, so that Release needs no memory
};

}  // namespace
}  // namespace tierstore

PYBIND11_MAKE_OPAQUE(tierstore::Over)

TIERSTORE_BINDINGS(uses) {
  using namespace tierstore;
  py::class_<Over, std::shared_ptr<Over>>(m, "Uses")
      .def(py::init<>())
      .def(
          "take",
          [](Over& over) {
            Over taken;
            taken.swap(over);
            py::list items;
            for (auto& [seq, slots] : taken) items.append(py::make_tuple(seq, slots));
            return items;
          },
          "Return the lookups that are over as (number, slots), each lookup once.");
  py::class_<Use>(m, "Use")
      .def(py::init<std::shared_ptr<Over>, std::int64_t, py::object>(), py::arg("uses"), py::arg("seq"),
           py::arg("slots"))
      .def("release", &Use::Release, "End the lookup; a second call does nothing.")
      .def_property_readonly("held", &Use::held);
}
