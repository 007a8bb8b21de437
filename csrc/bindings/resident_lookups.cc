// Binds ResidentLookups: lookups in a tier that no row ever leaves. Returned arrays are views that keep their
// owner alive; callers do not write to them.
#include "cache/resident_lookups.h"

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/host_rows.h"
#include "bindings/registry.h"

namespace py = pybind11;

namespace tierstore {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

template <auto Member>
auto RowsView() {
  return [](py::object self) { return View(self.cast<const ResidentRows&>().*Member, self); };
}

// Returns, int64 (lookups, 3), where the keys of each lookup's unique rows are, how many they are, and where
// the rows' csr_start is. The array keeps the lookups.
py::array_t<std::int64_t> PlacesOf(std::vector<std::shared_ptr<ResidentRows>>&& lookups) {
  struct Kept {
    std::vector<std::shared_ptr<ResidentRows>> lookups;
    std::vector<std::array<std::int64_t, 3>> places;
  };
  auto kept = std::make_unique<Kept>(Kept{std::move(lookups), {}});
  for (const auto& rows : kept->lookups) {
    const PageVector<std::uint64_t>& keys = rows->batch->unique;
    kept->places.push_back({reinterpret_cast<std::int64_t>(keys.data()),
                            static_cast<std::int64_t>(keys.size()),
                            reinterpret_cast<std::int64_t>(rows->csr_start.data())});
  }
  const py::capsule owner(kept.get(), [](void* at) { delete static_cast<Kept*>(at); });
  const Kept& made = *kept.release();
  const std::vector<py::ssize_t> shape = {static_cast<py::ssize_t>(made.places.size()), 3};
  return py::array_t<std::int64_t>(shape, made.places.empty() ? nullptr : made.places[0].data(), owner);
}

py::tuple TakeCounted(ResidentLookups& lookups) {
  ResidentLookups::Counted counted = lookups.Take();
  return py::make_tuple(PlacesOf(std::move(counted.lookups)),
                        py::make_tuple(std::move(counted.table_rows), std::move(counted.table_hits)),
                        py::make_tuple(counted.positions, counted.hits), counted.read_rows,
                        py::make_tuple(counted.seconds, counted.announce_seconds, counted.compute_seconds));
}

// NewHostRows are rows in host memory that begin with initial values.
class NewHostRows : public NewRows {
 public:
  NewHostRows(HostRows* rows, const InitialValues& values)
      : rows_(*rows),
        values_(values),
        at_(rows->Of(values.dim + values.state_floats)),
        tables_(values.Tables()) {}

  void Commit(std::int64_t slots) const override { rows_.Commit(slots); }
  void Fill(const PageVector<std::int32_t>& slots, const PageVector<std::uint64_t>& keys) const override {
    const auto n = static_cast<std::int64_t>(keys.size());
    RequireTables(keys.data(), n, tables_.num_tables, kNoKind);
    InitRows(at_, slots.data(), keys.data(), n, values_.dim, values_.state_floats, values_.state_value,
             tables_);
  }

 private:
  HostRows& rows_;
  const InitialValues& values_;
  const Rows at_;
  const TableInit tables_;
};

// Holds a lock of Python, if the lock was free, as long as this object lives. Make and end a FreeLock with
// the interpreter's lock held; no code that is written in Python runs meanwhile.
class FreeLock {
 public:
  explicit FreeLock(const py::object& lock) : lock_(lock), held_(lock.attr("acquire")(false).cast<bool>()) {}
  FreeLock(const FreeLock&) = delete;
  FreeLock& operator=(const FreeLock&) = delete;
  ~FreeLock() {
    if (held_) lock_.attr("release")();
  }
  bool held() const { return held_; }

 private:
  const py::object& lock_;
  const bool held_;
};

std::shared_ptr<ResidentRows> AddRows(ResidentLookups& lookups, std::shared_ptr<Batch> batch, HostRows& rows,
                                      const InitialValues& values, const py::object& lock) {
  const NewHostRows fresh(&rows, values);
  const FreeLock held(lock);
  if (!held.held()) return nullptr;
  const py::gil_scoped_release unlocked;
  return lookups.Add(std::move(batch), fresh);
}

}  // namespace

TIERSTORE_BINDINGS(resident_lookups) {
  py::class_<ResidentRows, std::shared_ptr<ResidentRows>>(m, "ResidentRows")
      .def_readonly("batch", &ResidentRows::batch)
      .def_property_readonly("slots", RowsView<&ResidentRows::slots>())
      .def_readonly("missing", &ResidentRows::missing)
      .def_property_readonly("csr_start", RowsView<&ResidentRows::csr_start>())
      .def_property_readonly("csr_positions", RowsView<&ResidentRows::csr_positions>());
  py::class_<ResidentLookups>(m, "ResidentLookups", "Lookups in a tier that no row ever leaves.")
      .def(py::init<Tier*, std::size_t>(), py::arg("tier"), py::arg("tables"), py::keep_alive<1, 2>())
      .def("begin_plan", &ResidentLookups::BeginPlan, Unlocked(), "Add nothing until end_plan().")
      .def("end_plan", &ResidentLookups::EndPlan, Unlocked())
      .def("hide", &ResidentLookups::Hide, Unlocked(), "Find nothing until show(): rows are being added.")
      .def("show", &ResidentLookups::Show, Unlocked())
      .def("find", &ResidentLookups::Find, py::arg("batch"), Unlocked(),
           "Return the rows of a batch, or None where a row is missing or rows are hidden.")
      .def(
          "add", &AddRows, py::arg("batch"), py::arg("rows"), py::arg("values"), py::arg("lock"),
          "Return the rows of a batch; missing rows begin with initial values. Returns None where a plan has "
          "to add the rows: during a plan, while another thread holds the tier's lock (a threading.RLock), "
          "or where memory is refused.")
      .def("read", &ResidentLookups::Read, py::arg("batch"), py::arg("may_miss"), Unlocked(),
           "Return the rows of a batch that is read outside of training, without positions. Returns None "
           "where find() does, but rows may be missing if may_miss.")
      .def_property_readonly("due", &ResidentLookups::due, "Whether take() should be called.")
      .def("take", &TakeCounted,
           "Return what is to be counted of the lookups since the last call: where the keys of each lookup's "
           "unique rows are, how many they are, and where csr_start is (int64 (lookups, 3), which keeps this "
           "memory), the unique rows of each table and how many of these rows were here, the positions and "
           "how many of them use rows that were here, the unique rows of read(), the seconds of find() and "
           "add(), the seconds of removing repeated ids, and the seconds of kernels in calls of "
           "ResidentForward.");
}

}  // namespace tierstore
