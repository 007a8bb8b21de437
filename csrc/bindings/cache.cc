// Binds the classes of lookups and of rows outside of tiers: Batch, HeldRows, Sweep, Window. Returned arrays
// are views that keep their owner alive; callers do not write to them.
#include <numeric>
#include <optional>

#include "bindings/arrays.h"
#include "bindings/csr.h"
#include "bindings/host_rows.h"
#include "bindings/registry.h"
#include "cache/batch.h"
#include "cache/held_rows.h"
#include "cache/sort_keys.h"
#include "cache/sweep.h"
#include "cache/window.h"
#include "common/content_hash.h"

namespace py = pybind11;

namespace tierstore {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

std::vector<IdSegment> SegmentsOf(const py::list& segments) {
  std::vector<IdSegment> list;
  for (const py::handle item : segments) {
    const auto t = item.cast<py::tuple>();
    list.push_back({reinterpret_cast<const void*>(t[0].cast<std::uintptr_t>()), t[1].cast<std::int64_t>(),
                    t[2].cast<bool>(), t[3].cast<std::uint32_t>(), t[4].cast<std::int64_t>(),
                    t[5].cast<std::int64_t>()});
  }
  return list;
}

py::tuple MakeBatch(const py::list& segments) {
  const std::vector<IdSegment> list = SegmentsOf(segments);
  auto batch = std::make_shared<Batch>();
  BadId bad;
  {
    py::gil_scoped_release unlocked;
    bad = Deduplicate(list, batch.get());
  }
  return py::make_tuple(batch, bad.segment, bad.position, bad.id);
}

py::tuple MakeSortKeys(const py::list& segments, const std::vector<std::uint32_t>& bases,
                       std::uint32_t skipped, Array<std::uint32_t>& keys) {
  const std::vector<IdSegment> list = SegmentsOf(segments);
  std::int64_t count = 0;
  for (const IdSegment& segment : list) count += segment.count;
  Require(bases.size() == list.size(), "every segment needs the base of its table");
  Require(keys.size() == count, "there must be as many keys as ids");
  std::uint32_t* const to = keys.mutable_data();
  BadId bad;
  {
    const py::gil_scoped_release unlocked;
    bad = WriteSortKeys(list, bases, skipped, to);
  }
  return py::make_tuple(bad.segment, bad.position, bad.id);
}

// Calls a method that changes the rows, and says at which slot the row of each key is.
template <void (HeldRows::*Method)(const std::uint64_t*, std::int64_t, std::int32_t*)>
Array<std::int32_t> SlotsBy(HeldRows& held, const Array<std::uint64_t>& keys) {
  Array<std::int32_t> slots = Fresh<std::int32_t>(keys.size());
  std::int32_t* out = slots.mutable_data();
  py::gil_scoped_release unlocked;
  (held.*Method)(keys.data(), keys.size(), out);
  return slots;
}

void BindHeldRows(py::module_& m) {
  py::class_<HeldRows>(m, "HeldRows")
      .def(py::init<std::int64_t, std::int64_t>(), py::arg("capacity"), py::arg("row_bytes"))
      .def_property_readonly_static("BYTES_PER_ROW", [](py::object) { return HeldRows::kBytesPerRow; })
      .def("find", &FindSlots<HeldRows>, py::arg("keys"),
           "Return the slots (int32) of keys (uint64), -1 where a row is not here.")
      .def("add", &SlotsBy<&HeldRows::Add>, py::arg("keys"))
      .def(
          "begin",
          [](HeldRows& held, const Array<std::uint64_t>& keys) {
            PageVector<std::uint64_t> begun(keys.data(), keys.data() + keys.size());
            PageVector<std::int32_t> slots(begun.size());
            {
              py::gil_scoped_release unlocked;
              const auto n = held.Begin(begun.data(), static_cast<std::int64_t>(begun.size()), slots.data());
              begun.resize(static_cast<std::size_t>(n));
              slots.resize(static_cast<std::size_t>(n));
            }
            return py::make_tuple(Owned(std::move(begun)), Owned(std::move(slots)));
          },
          py::arg("keys"),
          "Return the keys (uint64) that are neither here nor on their way, and slots (int32) for them.")
      .def(
          "finish",
          [](HeldRows& held, const Array<std::int32_t>& slots, const Array<bool>& found) {
            py::gil_scoped_release unlocked;
            held.Finish(slots.data(), found.data(), slots.size());
          },
          py::arg("slots"), py::arg("found"))
      .def(
          "discard",
          [](HeldRows& held, const Array<std::uint64_t>& keys) {
            py::gil_scoped_release unlocked;
            held.Discard(keys.data(), keys.size());
          },
          py::arg("keys"))
      .def("take", &SlotsBy<&HeldRows::Take>, py::arg("keys"),
           "Return what find() does, and discard the keys; the rows stay at these slots until release().")
      .def("release", &HeldRows::Release, Unlocked(), "Let go of the rows of the last take().")
      .def_property_readonly(
          "rows",
          [](py::object self) {
            auto& held = self.cast<HeldRows&>();
            return Array<std::uint8_t>({held.capacity(), held.row_bytes()},
                                       reinterpret_cast<std::uint8_t*>(held.rows()), self);
          },
          "Return the rows of all slots, uint8 (capacity, row_bytes).")
      .def_property_readonly("room", &HeldRows::room)
      .def_property_readonly("capacity", &HeldRows::capacity)
      .def("__len__", &HeldRows::size);
}

void BindSweep(py::module_& m) {
  py::class_<Sweep>(m, "Sweep")
      .def(py::init<>())
      .def_property_readonly_static("BYTES_PER_ENTRY", [](py::object) { return Sweep::kBytesPerEntry; })
      .def(
          "add",
          [](Sweep& sweep, const Array<std::uint64_t>& keys, const Array<std::uint64_t>& places,
             const Array<std::int64_t>& seqs) {
            py::gil_scoped_release unlocked;
            sweep.Add(keys.data(), places.data(), seqs.data(), keys.size());
          },
          py::arg("keys"), py::arg("places"), py::arg("seqs"))
      .def(
          "next",
          [](Sweep& sweep, double way, std::int64_t limit, std::int64_t first, std::int64_t last) {
            PageVector<std::uint64_t> keys;
            std::int64_t earliest = 0;
            {
              py::gil_scoped_release unlocked;
              earliest = sweep.Next(way, limit, first, last, &keys);
            }
            return py::make_tuple(Owned(std::move(keys)), earliest);
          },
          py::arg("way"), py::arg("limit"), py::arg("first"), py::arg("last"))
      .def_property_readonly("rounds", &Sweep::rounds)
      .def("__len__", &Sweep::size);
}

void BindWindow(py::module_& m) {
  py::class_<Window>(m, "Window")
      .def(py::init<bool>(), py::arg("knows_uses") = true)
      .def_property_readonly_static("BYTES_PER_ROW", [](py::object) { return Window::kBytesPerRow; })
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
          [](Window& window, std::int64_t seq) -> std::optional<Array<std::int64_t>> {
            PageVector<std::int64_t> next_use;
            {
              py::gil_scoped_release unlocked;
              next_use = window.Take(seq);
            }
            if (!window.knows_uses()) return std::nullopt;
            return Owned(std::move(next_use));
          },
          py::arg("seq"))
      .def("clear",
           [](Window& window) {
             PageVector<std::uint64_t> keys;
             {
               py::gil_scoped_release unlocked;
               keys = window.Clear();
             }
             return Owned(std::move(keys));
           })
      .def_property_readonly("lookups", &Window::lookups)
      .def_property_readonly("distinct_rows", &Window::distinct_rows)
      .def_property_readonly("memory_bytes", &Window::memory_bytes);
}

}  // namespace
}  // namespace tierstore

TIERSTORE_BINDINGS(cache) {
  using namespace tierstore;
  py::class_<Batch, std::shared_ptr<Batch>>(m, "Batch")
      .def(py::init([](const Array<std::uint64_t>& unique) {
             auto batch = std::make_shared<Batch>();
             batch->unique.assign(unique.data(), unique.data() + unique.size());
             return batch;
           }),
           py::arg("unique"), "A batch of these keys (uint64), of which a device has the rest.")
      .def_property_readonly("unique", [](py::object self) { return View(self.cast<Batch&>().unique, self); })
      .def_property_readonly("inverse",
                             [](py::object self) { return View(self.cast<Batch&>().inverse, self); })
      .def_property_readonly(
          "device_inverse", [](py::object self) { return View(self.cast<Batch&>().inverse, self); },
          "The inverse as calls of the lookup's device take it.")
      .def_property_readonly(
          "is_whole", [](const Batch& batch) { return !batch.inverse.empty() || batch.unique.empty(); },
          "Whether the core has the inverse.")
      .def(
          "transposed",
          [](const Batch& batch) {
            return Transposed(batch.inverse, batch.parts, static_cast<std::int64_t>(batch.unique.size()));
          },
          "Do what build_csr does, by the threads of the pool.")
      .def("bring", [](const Batch&) {}, "Let the host have the inverse, and the positions of transposed().");
  m.def("sort_keys", &MakeSortKeys, py::arg("segments"), py::arg("bases"), py::arg("skipped"),
        py::arg("keys").noconvert(),
        "Write a number (uint32) for every id of the segments, as make_batch takes them: the base of its "
        "table and the id, or `skipped` for padding. Returns (bad segment or -1, position of the bad id, the "
        "id).");
  m.def("make_batch", &MakeBatch, py::arg("segments"),
        "Deduplicate ids. segments has (address, count, is_int32, table, bound, padding id or -1) of each "
        "feature. Returns (batch, bad segment or -1, position of the bad id, the id).");
  m.def(
      "content_hash",
      [](std::uintptr_t address, std::size_t bytes) {
        const auto* const data = reinterpret_cast<const void*>(address);
        // Getting the interpreter's lock back from a busy thread takes longer than hashing a few bytes.
        constexpr std::size_t kUnlockFrom = 1 << 20;
        if (bytes < kUnlockFrom) return ContentHash(data, bytes);
        const py::gil_scoped_release unlocked;
        return ContentHash(data, bytes);
      },
      py::arg("address"), py::arg("bytes"),
      "Return a hash of these bytes: XXH64, and of more than 1 MiB the XXH64 of the hashes of its pieces.");
  m.def(
      "batch_of_unique",
      [](const Array<std::uint64_t>& keys) {
        auto batch = std::make_shared<Batch>();
        batch->unique.assign(keys.data(), keys.data() + keys.size());
        batch->inverse.resize(static_cast<std::size_t>(keys.size()));
        std::iota(batch->inverse.begin(), batch->inverse.end(), 0);
        return batch;
      },
      py::arg("keys"), "Return a batch of keys (uint64) that have no repeats.");
  m.def(
      "rows_array",
      [](std::int64_t n, std::int64_t row_bytes) {
        Array<std::uint8_t> rows = Fresh<std::uint8_t>(n * row_bytes);
        return rows.reshape({n, row_bytes});
      },
      py::arg("n"), py::arg("row_bytes"),
      "Return room for n rows, uint8 (n, row_bytes) in no defined state, outside malloc's heap when large.");
  BindHeldRows(m);
  BindSweep(m);
  BindWindow(m);
}
