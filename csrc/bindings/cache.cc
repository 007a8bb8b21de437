// Bindings of the memory tiers: Batch, Tier, Plan, HeldRows, Window. Arrays that are returned are views that
// keep their owner alive; callers do not write to them.
#include <numeric>

#include "bindings/arrays.h"
#include "bindings/registry.h"
#include "cache/batch.h"
#include "cache/held_rows.h"
#include "cache/tier.h"
#include "cache/window.h"
#include "common/content_hash.h"

namespace py = pybind11;

namespace tierstore {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;
using Unlocked = py::call_guard<py::gil_scoped_release>;

template <typename Vector>
auto View(const Vector& values, py::handle owner) {
  return Array<typename Vector::value_type>(static_cast<py::ssize_t>(values.size()), values.data(), owner);
}

template <auto Member>
auto PlanView() {
  return [](py::object self) { return View(self.cast<Plan&>().*Member, self); };
}

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

PolicyHooks HooksFrom(std::uintptr_t state, const py::dict& hooks) {
  PolicyHooks out;
  out.state = reinterpret_cast<void*>(state);
  const auto address = [&](const char* name) { return hooks[name].cast<std::uintptr_t>(); };
  out.touch = reinterpret_cast<PolicyHooks::Use>(address("touch"));
  out.insert = reinterpret_cast<PolicyHooks::Use>(address("insert"));
  out.announce = reinterpret_cast<PolicyHooks::Announce>(address("announce"));
  out.remove = reinterpret_cast<PolicyHooks::Remove>(address("remove"));
  out.evict = reinterpret_cast<PolicyHooks::Evict>(address("evict"));
  if (hooks.contains("admit")) out.admit = reinterpret_cast<PolicyHooks::Admit>(address("admit"));
  return out;
}

ShareConfig MakeShare(std::int64_t capacity, std::uintptr_t state, const py::object& hooks,
                      std::pair<std::uintptr_t, std::uintptr_t> filter) {
  ShareConfig share{capacity, {}, {}};
  share.filter = {reinterpret_cast<void*>(filter.first), reinterpret_cast<PolicyHooks::Admit>(filter.second)};
  if (!hooks.is_none()) share.policy = HooksFrom(state, hooks.cast<py::dict>());
  return share;
}

std::unique_ptr<Tier> MakeTier(std::int64_t capacity, std::int64_t row_bytes, bool grows,
                               std::uintptr_t state, const py::object& hooks,
                               std::pair<std::uintptr_t, std::uintptr_t> filter, std::int64_t pad,
                               const py::list& others, std::vector<std::int32_t> share_of) {
  TierConfig config{pad, row_bytes, grows, {MakeShare(capacity, state, hooks, filter)}, std::move(share_of)};
  for (const py::handle item : others) {
    const auto share = item.cast<py::tuple>();
    config.shares.push_back(MakeShare(share[0].cast<std::int64_t>(), share[1].cast<std::uintptr_t>(),
                                      share[2], share[3].cast<std::pair<std::uintptr_t, std::uintptr_t>>()));
  }
  return std::make_unique<Tier>(config);
}

py::tuple DepartureArrays(Departures rows) {
  return py::make_tuple(Owned(std::move(rows.slots)), Owned(std::move(rows.keys)),
                        Owned(std::move(rows.dirty)), Owned(std::move(rows.next_use)));
}

void BindPlan(py::module_& m) {
  py::class_<Plan>(m, "Plan")
      .def_readonly("now", &Plan::now)
      .def_readonly("needed", &Plan::needed)
      .def_property_readonly("slots", PlanView<&Plan::slots>())
      .def_readonly("refused", &Plan::refused)
      .def_property_readonly("table_rows", [](const Plan& plan) { return plan.table_rows; })
      .def_property_readonly("table_hits", [](const Plan& plan) { return plan.table_hits; })
      .def("unplaced", [](const Plan& plan) { return Owned(plan.Unplaced()); })
      .def_property_readonly("misses", PlanView<&Plan::misses>())
      .def_property_readonly("absent", PlanView<&Plan::absent>())
      .def_property_readonly("next_use", PlanView<&Plan::next_use>())
      .def_property_readonly("victims", [](const Plan& plan) { return DepartureArrays(plan.victims); });
}

// Slots of keys in a Tier or HeldRows, int32; -1 where a key is not.
template <class Rows>
Array<std::int32_t> FindSlots(const Rows& rows, const Array<std::uint64_t>& keys) {
  Array<std::int32_t> slots = Fresh<std::int32_t>(keys.size());
  std::int32_t* out = slots.mutable_data();
  py::gil_scoped_release unlocked;
  rows.Find(keys.data(), keys.size(), out);
  return slots;
}

void BindTier(py::module_& m) {
  py::class_<Tier>(m, "Tier")
      .def(py::init(&MakeTier), py::arg("capacity"), py::arg("row_bytes"), py::arg("grows"),
           py::arg("policy_state"), py::arg("policy_hooks"), py::arg("filter") = std::pair(0, 0),
           py::arg("pad") = 0, py::arg("others") = py::list(),
           py::arg("share_of") = std::vector<std::int32_t>())
      .def_property_readonly_static("BYTES_PER_SLOT", [](py::object) { return Tier::kBytesPerSlot; })
      .def(
          "begin",
          [](Tier& tier, const Array<std::uint64_t>& keys, const std::optional<Array<std::int64_t>>& next_use,
             std::int64_t now, bool absent) {
            if (next_use && next_use->size() != keys.size())
              throw std::invalid_argument("next_use: wrong length");
            auto plan = std::make_unique<Plan>();
            py::gil_scoped_release unlocked;
            tier.Begin(keys.data(), next_use ? next_use->data() : nullptr, keys.size(), now, absent,
                       plan.get());
            return plan;
          },
          py::arg("keys"), py::arg("next_use"), py::arg("now"), py::arg("absent") = false)
      .def(
          "evict", [](Tier& tier, std::int64_t since, Plan& plan) { return tier.Evict(since, &plan); },
          py::arg("pinned_since"), py::arg("plan"), Unlocked())
      .def(
          "prepare", [](Tier& tier, bool use_pad, const Plan& plan) { tier.Prepare(use_pad, plan); },
          py::arg("use_pad"), py::arg("plan"), Unlocked())
      .def(
          "assign",
          [](Tier& tier, const Array<std::uint64_t>& keys, bool use_pad, Plan& plan) {
            py::gil_scoped_release unlocked;
            tier.Assign(keys.data(), use_pad, &plan);
          },
          py::arg("keys"), py::arg("use_pad"), py::arg("plan"))
      .def(
          "abort", [](Tier& tier, Plan& plan) { tier.Abort(&plan); }, Unlocked())
      .def("release",
           [](Tier& tier, const Array<std::int32_t>& slots) { tier.Release(slots.data(), slots.size()); })
      .def("drainable", [](const Tier& tier) { return DepartureArrays(tier.Drainable()); })
      .def("drained",
           [](Tier& tier, const Array<std::int32_t>& slots) { tier.Drained(slots.data(), slots.size()); })
      .def("find", &FindSlots<Tier>)
      .def("remove",
           [](Tier& tier, const Array<std::int32_t>& slots) { tier.Remove(slots.data(), slots.size()); })
      .def(
          "announce",
          [](Tier& tier, const Array<std::uint64_t>& keys, std::int64_t next_use, std::int64_t now) {
            PageVector<std::uint64_t> absent;
            {
              py::gil_scoped_release unlocked;
              absent = tier.Announce(keys.data(), keys.size(), next_use, now);
            }
            return Owned(std::move(absent));
          },
          py::arg("keys"), py::arg("next_use"), py::arg("now"), "Returns the keys that are not here.")
      .def("mark_dirty",
           [](Tier& tier, const Array<std::int32_t>& slots) {
             py::gil_scoped_release unlocked;
             tier.MarkDirty(slots.data(), slots.size());
           })
      .def("mark_clean",
           [](Tier& tier, const Array<std::int32_t>& slots) { tier.MarkClean(slots.data(), slots.size()); })
      .def("set_dirty",
           [](Tier& tier, const Array<std::int32_t>& slots, const Array<std::uint8_t>& dirty) {
             if (slots.size() != dirty.size()) throw std::invalid_argument("set_dirty: lengths differ");
             tier.SetDirty(slots.data(), dirty.data(), slots.size());
           })
      .def("dirty_of",
           [](const Tier& tier, const Array<std::int32_t>& slots) {
             Array<std::uint8_t> out = Fresh<std::uint8_t>(slots.size());
             for (py::ssize_t i = 0; i < slots.size(); ++i)
               out.mutable_data()[i] = tier.dirty()[slots.data()[i]];
             return out;
           })
      .def("keys_of",
           [](const Tier& tier, const Array<std::int32_t>& slots) {
             Array<std::uint64_t> out = Fresh<std::uint64_t>(slots.size());
             for (py::ssize_t i = 0; i < slots.size(); ++i) out.mutable_data()[i] = tier.key(slots.data()[i]);
             return out;
           })
      .def(
          "resident_slots",
          [](const Tier& tier, bool dirty, std::int64_t from, std::int64_t limit) {
            return Owned(tier.ResidentSlots(dirty, from, limit));
          },
          py::arg("only_dirty"), py::arg("start"), py::arg("limit"))
      .def_property_readonly("rows_addr",
                             [](const Tier& t) { return reinterpret_cast<std::uintptr_t>(t.rows()); })
      .def("table_rows", &Tier::TableRows, Unlocked(), "Rows of every table that are here.")
      .def_property_readonly("capacity", &Tier::capacity)
      .def_property_readonly("row_bytes", &Tier::row_bytes)
      .def_property_readonly("pad_in_use", &Tier::pad_in_use)
      .def_property_readonly("metadata_bytes", &Tier::metadata_bytes)
      .def_property_readonly("policy_seconds", &Tier::policy_seconds)
      .def("__len__", &Tier::size);
}

void BindHeldRows(py::module_& m) {
  py::class_<HeldRows>(m, "HeldRows")
      .def(py::init<std::int64_t, std::int64_t>(), py::arg("capacity"), py::arg("row_bytes"))
      .def_property_readonly_static("BYTES_PER_ROW", [](py::object) { return HeldRows::kBytesPerRow; })
      .def("find", &FindSlots<HeldRows>)
      .def("add",
           [](HeldRows& held, const Array<std::uint64_t>& keys) {
             Array<std::int32_t> slots = Fresh<std::int32_t>(keys.size());
             std::int32_t* out = slots.mutable_data();
             py::gil_scoped_release unlocked;
             held.Add(keys.data(), keys.size(), out);
             return slots;
           })
      .def("remove",
           [](HeldRows& held, const Array<std::int32_t>& slots) {
             py::gil_scoped_release unlocked;
             held.Remove(slots.data(), slots.size());
           })
      .def("discard",
           [](HeldRows& held, const Array<std::uint64_t>& keys) {
             py::gil_scoped_release unlocked;
             held.Discard(keys.data(), keys.size());
           })
      .def(
          "rows",
          [](py::object self, std::int64_t n) {
            auto& held = self.cast<HeldRows&>();
            if (n < 0 || n > held.capacity()) throw std::invalid_argument("rows: beyond the capacity");
            return Array<std::uint8_t>({n, held.row_bytes()}, reinterpret_cast<std::uint8_t*>(held.rows()),
                                       self);
          },
          py::arg("n"), "The first n slots, uint8 (n, row_bytes), to be read into.")
      .def_property_readonly("rows_addr",
                             [](const HeldRows& h) { return reinterpret_cast<std::uintptr_t>(h.rows()); })
      .def_property_readonly("capacity", &HeldRows::capacity)
      .def("__len__", &HeldRows::size);
}

void BindWindow(py::module_& m) {
  py::class_<Window>(m, "Window")
      .def(py::init<>())
      .def("announce",
           [](Window& window, std::int64_t seq, std::shared_ptr<Batch> batch) {
             PageVector<std::uint64_t> keys;
             {
               py::gil_scoped_release unlocked;
               keys = window.Announce(seq, std::move(batch));
             }
             return Owned(std::move(keys));
           })
      .def("take",
           [](Window& window, std::int64_t seq) {
             PageVector<std::int64_t> next_use;
             {
               py::gil_scoped_release unlocked;
               next_use = window.Take(seq);
             }
             return Owned(std::move(next_use));
           })
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
      "A batch of keys (uint64) without repeats.");
  py::register_exception<PolicyFault>(m, "PolicyFault", PyExc_RuntimeError);
  py::register_exception<PadFull>(m, "PadFull", PyExc_RuntimeError);
  py::register_exception<AddressSpaceError>(m, "AddressSpaceError", PyExc_RuntimeError);
  m.def(
      "rows_array",
      [](std::int64_t n, std::int64_t row_bytes) {
        Array<std::uint8_t> rows = Fresh<std::uint8_t>(n * row_bytes);
        return rows.reshape({n, row_bytes});
      },
      "Room for n rows, uint8 (n, row_bytes) in no defined state, outside malloc's heap when large.");
  BindPlan(m);
  BindTier(m);
  BindHeldRows(m);
  BindWindow(m);
}
