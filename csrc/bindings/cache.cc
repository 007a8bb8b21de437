// Bindings of what lookups and rows outside tiers need: Batch, HeldRows, Window. Arrays that are returned are
// views that keep their owner alive; callers do not write to them.
#include <numeric>

#include "bindings/arrays.h"
#include "bindings/registry.h"
#include "cache/batch.h"
#include "cache/held_rows.h"
#include "cache/window.h"
#include "common/content_hash.h"

namespace py = pybind11;

namespace tierstore {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

py::tuple MakeBatch(const py::list& segments) {
  std::vector<IdSegment> list;
  for (const py::handle item : segments) {
    const auto t = item.cast<py::tuple>();
    list.push_back({reinterpret_cast<const void*>(t[0].cast<std::uintptr_t>()), t[1].cast<std::int64_t>(),
                    t[2].cast<bool>(), t[3].cast<std::uint32_t>(), t[4].cast<std::int64_t>(),
                    t[5].cast<std::int64_t>()});
  }
  auto batch = std::make_shared<Batch>();
  BadId bad;
  {
    py::gil_scoped_release unlocked;
    bad = Deduplicate(list, batch.get());
  }
  return py::make_tuple(batch, bad.segment, bad.position, bad.id);
}

void BindHeldRows(py::module_& m) {
  py::class_<HeldRows>(m, "HeldRows")
      .def(py::init<std::int64_t, std::int64_t>(), py::arg("capacity"), py::arg("row_bytes"))
      .def_property_readonly_static("BYTES_PER_ROW", [](py::object) { return HeldRows::kBytesPerRow; })
      .def("find", &FindSlots<HeldRows>, py::arg("keys"),
           "Slots (int32) of keys (uint64), -1 where a row is not here.")
      .def(
          "add",
          [](HeldRows& held, const Array<std::uint64_t>& keys) {
            Array<std::int32_t> slots = Fresh<std::int32_t>(keys.size());
            std::int32_t* out = slots.mutable_data();
            py::gil_scoped_release unlocked;
            held.Add(keys.data(), keys.size(), out);
            return slots;
          },
          py::arg("keys"))
      .def(
          "remove",
          [](HeldRows& held, const Array<std::int32_t>& slots) {
            py::gil_scoped_release unlocked;
            held.Remove(slots.data(), slots.size());
          },
          py::arg("slots"))
      .def(
          "discard",
          [](HeldRows& held, const Array<std::uint64_t>& keys) {
            py::gil_scoped_release unlocked;
            held.Discard(keys.data(), keys.size());
          },
          py::arg("keys"))
      .def(
          "rows",
          [](py::object self, std::int64_t n) {
            auto& held = self.cast<HeldRows&>();
            if (n < 0 || n > held.capacity()) throw std::invalid_argument("rows: beyond the capacity");
            return Array<std::uint8_t>({n, held.row_bytes()}, reinterpret_cast<std::uint8_t*>(held.rows()),
                                       self);
          },
          py::arg("n"), "The first n slots, uint8 (n, row_bytes), to be read into.")
      .def_property_readonly("capacity", &HeldRows::capacity)
      .def("__len__", &HeldRows::size);
}

void BindWindow(py::module_& m) {
  py::class_<Window>(m, "Window")
      .def(py::init<>())
      .def(
          "announce",
          [](Window& window, std::int64_t seq, std::shared_ptr<Batch> batch) {
            PageVector<std::uint64_t> keys;
            {
              py::gil_scoped_release unlocked;
              keys = window.Announce(seq, std::move(batch));
            }
            return Owned(std::move(keys));
          },
          py::arg("seq"), py::arg("batch"))
      .def(
          "take",
          [](Window& window, std::int64_t seq) {
            PageVector<std::int64_t> next_use;
            {
              py::gil_scoped_release unlocked;
              next_use = window.Take(seq);
            }
            return Owned(std::move(next_use));
          },
          py::arg("seq"))
      .def("clear", [](Window& window) { return Owned(window.Clear()); })
      .def_property_readonly("lookups", &Window::lookups)
      .def_property_readonly("distinct_rows", &Window::distinct_rows)
      .def_property_readonly("memory_bytes", &Window::memory_bytes);
}

}  // namespace
}  // namespace tierstore

TIERSTORE_BINDINGS(cache) {
  using namespace tierstore;
  py::class_<Batch, std::shared_ptr<Batch>>(m, "Batch")
      .def_property_readonly("unique", [](py::object self) { return View(self.cast<Batch&>().unique, self); })
      .def_property_readonly("inverse",
                             [](py::object self) { return View(self.cast<Batch&>().inverse, self); });
  m.def("make_batch", &MakeBatch, py::arg("segments"),
        "Deduplicates ids. segments: (address, count, is_int32, table, bound, padding id or -1) per feature. "
        "Returns (batch, bad segment or -1, its position, the id).");
  m.def(
      "content_hash",
      [](std::uintptr_t address, std::size_t bytes) {
        return ContentHash(reinterpret_cast<const void*>(address), bytes);
      },
      py::arg("address"), py::arg("bytes"), Unlocked(), "A hash (XXH64) of so many bytes.");
  m.def(
      "batch_of_unique",
      [](const Array<std::uint64_t>& keys) {
        auto batch = std::make_shared<Batch>();
        batch->unique.assign(keys.data(), keys.data() + keys.size());
        batch->inverse.resize(static_cast<std::size_t>(keys.size()));
        std::iota(batch->inverse.begin(), batch->inverse.end(), 0);
        return batch;
      },
      py::arg("keys"), "A batch of keys (uint64) without repeats.");
  m.def(
      "rows_array",
      [](std::int64_t n, std::int64_t row_bytes) {
        Array<std::uint8_t> rows = Fresh<std::uint8_t>(n * row_bytes);
        return rows.reshape({n, row_bytes});
      },
      py::arg("n"), py::arg("row_bytes"),
      "Room for n rows, uint8 (n, row_bytes) in no defined state, outside malloc's heap when large.");
  BindHeldRows(m);
  BindWindow(m);
}
