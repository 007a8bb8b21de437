// Binds a memory tier's slots: ShareConfig, Plan, Tier. Returned arrays are views that keep their owner
// alive; callers do not write to them.
#include "cache/tier.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/host_rows.h"
#include "bindings/registry.h"
#include "cache/plan_counts.h"

namespace py = pybind11;

namespace tierstore {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

// Calls work(slots, n), for many slots without the interpreter's lock: the pool's threads share such work,
// and no other thread of Python may have to wait for them. For few slots, getting the lock back takes longer.
template <typename Work>
void WithoutLock(const Array<std::int32_t>& slots, const Work& work, py::ssize_t many = 1 << 13) {
  const std::int32_t* const at = slots.data();
  const std::int64_t n = slots.size();
  if (n < many) return work(at, n);
  const py::gil_scoped_release unlocked;
  work(at, n);
}

template <auto Member>
auto PlanView() {
  return [](py::object self) { return View(self.cast<const Plan&>().whole().*Member, self); };
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

ShareConfig MakeShare(std::int64_t slots, std::uintptr_t policy_state, const std::optional<py::dict>& hooks,
                      std::uintptr_t filter_state, std::uintptr_t filter_admit) {
  ShareConfig share{slots, {}, {}};
  share.filter = {reinterpret_cast<void*>(filter_state), reinterpret_cast<PolicyHooks::Admit>(filter_admit)};
  if (hooks) share.policy = HooksFrom(policy_state, *hooks);
  return share;
}

py::tuple DepartureArrays(Departures rows) {
  return py::make_tuple(Owned(std::move(rows.slots)), Owned(std::move(rows.keys)),
                        Owned(std::move(rows.dirty)), Owned(std::move(rows.next_use)));
}

// Returns (from, to).
py::tuple MoveArrays(Moves moves) {
  return py::make_tuple(Owned(std::move(moves.from)), Owned(std::move(moves.to)));
}

Moves Aborted(Tier& tier, Plan* plan) {
  const py::gil_scoped_release unlocked;
  return tier.Abort(plan);
}

py::tuple CountPlan(const Plan& plan, const Array<std::uint64_t>& missing, const Array<std::int32_t>& starts,
                    const std::vector<Array<bool>>& here, std::size_t tables) {
  const LanePlan& whole = plan.whole();
  const auto n = static_cast<std::size_t>(missing.size());
  if (n != whole.absent.size() || starts.size() != static_cast<py::ssize_t>(whole.slots.size()) + 1)
    throw std::invalid_argument("the arrays are not of this plan");
  std::vector<const bool*> flags;
  for (const Array<bool>& of_tier : here) flags.push_back(of_tier.data());
  for (std::size_t i = 0, left = n; i < here.size(); ++i) {
    if (static_cast<std::size_t>(here[i].size()) != left)
      throw std::invalid_argument("a tier was not asked for the rows that tiers above it do not have");
    left -= static_cast<std::size_t>(std::count(flags[i], flags[i] + left, true));
  }
  std::int64_t missed = 0;
  std::vector<TierCounts> counts;
  {
    const py::gil_scoped_release unlocked;
    missed = UsesOf(whole.misses, starts.data());
    counts = CountTiers(whole.absent, missing.data(), starts.data(), flags, tables);
  }
  py::list tiers;
  for (TierCounts& of : counts) {
    const auto totals = py::make_tuple(of.rows, of.hits, of.uses, of.hit_uses);
    tiers.append(py::make_tuple(totals, std::move(of.table_rows), std::move(of.table_hits)));
  }
  return py::make_tuple(missed, tiers);
}

void BindPlan(py::module_& m) {
  py::class_<Plan>(m, "Plan")
      .def_property_readonly("now", [](const Plan& plan) { return plan.whole().now; })
      .def_property_readonly("needed", [](const Plan& plan) { return plan.whole().needed; })
      .def_property_readonly("slots", PlanView<&LanePlan::slots>())
      .def_property_readonly("refused", [](const Plan& plan) { return plan.whole().refused; })
      .def_property_readonly("table_rows", [](const Plan& plan) { return plan.whole().table_rows; })
      .def_property_readonly("table_hits", [](const Plan& plan) { return plan.whole().table_hits; })
      .def("unplaced", [](const Plan& plan) { return Owned(plan.Unplaced()); })
      .def_property_readonly("misses", PlanView<&LanePlan::misses>())
      .def_property_readonly("absent", PlanView<&LanePlan::absent>())
      .def_property_readonly("victims",
                             [](const Plan& plan) { return DepartureArrays(plan.whole().victims); })
      .def("count", &CountPlan, py::arg("missing"), py::arg("starts"), py::arg("here"), py::arg("tables"),
           "Count the rows of a plan that lower tiers were asked for. missing (uint64): keys of the absent "
           "rows. starts (int32): where the positions of each row begin, and their end. here (bool): of each "
           "lower tier, which rows it has that no tier above it has. Returns the positions of the misses, "
           "and of each lower tier (rows asked for, rows found, positions of both), and of its tables the "
           "rows asked for and the rows found.");
}

void BindShare(py::module_& m) {
  py::class_<ShareConfig>(
      m, "ShareConfig",
      "Slots of a tier that some tables share. policy_state is the address of a policy's "
      "state, and policy_hooks has the addresses of its hooks by name; with None nothing is "
      "ever evicted. filter_state and filter_admit are an admission filter's addresses; "
      "with 0 all rows are admitted.")
      .def(py::init(&MakeShare), py::kw_only(), py::arg("slots"), py::arg("policy_state") = 0,
           py::arg("policy_hooks") = py::none(), py::arg("filter_state") = 0, py::arg("filter_admit") = 0);
}

// `share_of` is for lanes of several shares. Several lanes of a tier that grows divide rows by their ids.
std::unique_ptr<Tier> MakeTier(const std::vector<std::vector<ShareConfig>>& lanes, bool grows,
                               std::int64_t overflow_slots, const std::vector<std::int32_t>& share_of,
                               const std::vector<std::pair<std::size_t, std::size_t>>& lanes_of) {
  const auto count = static_cast<std::int64_t>(lanes.size());
  TierConfig config;
  for (const auto& [first, lanes_of_table] : lanes_of) config.lanes_of.push_back({first, lanes_of_table});
  for (const std::vector<ShareConfig>& shares : lanes) {
    const bool several = shares.size() > 1;
    config.lanes.push_back({(overflow_slots + count - 1) / count,
                            grows,
                            shares,
                            several ? share_of : std::vector<std::int32_t>(share_of.size(), 0),
                            {}});
  }
  return std::make_unique<Tier>(config);
}

void BindTier(py::module_& m) {
  py::class_<Tier>(m, "Tier")
      .def(py::init(&MakeTier), py::kw_only(), py::arg("lanes"), py::arg("grows") = false,
           py::arg("overflow_slots") = 0, py::arg("share_of") = std::vector<std::int32_t>(),
           py::arg("lanes_of") = std::vector<std::pair<std::size_t, std::size_t>>())
      .def_property_readonly_static("BYTES_PER_SLOT", [](py::object) { return Tier::kBytesPerSlot; })
      .def(
          "begin",
          [](Tier& tier, const Array<std::uint64_t>& keys, const std::optional<Array<std::int64_t>>& next_use,
             std::int64_t now, bool absent) {
            if (next_use && next_use->size() != keys.size())
              throw std::invalid_argument("next_use and keys differ in length");
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
          "prepare",
          [](Tier& tier, bool use_overflow, const Plan& plan) { return tier.Prepare(use_overflow, plan); },
          py::arg("use_overflow"), py::arg("plan"), Unlocked())
      .def(
          "assign",
          [](Tier& tier, const Array<std::uint64_t>& keys, bool use_overflow, Plan& plan) {
            py::gil_scoped_release unlocked;
            tier.Assign(keys.data(), use_overflow, &plan);
          },
          py::arg("keys"), py::arg("use_overflow"), py::arg("plan"))
      .def(
          "abort", [](Tier& tier, Plan& plan) { return MoveArrays(Aborted(tier, &plan)); }, py::arg("plan"),
          "End a plan before assign(). Returns (from, to), int32: the caller moves the rows at these slots.")
      .def(
          "release",
          [](Tier& tier, const Array<std::int32_t>& slots) {
            Moves moves;
            WithoutLock(slots, [&](const std::int32_t* at, std::int64_t n) { moves = tier.Release(at, n); });
            return MoveArrays(std::move(moves));
          },
          py::arg("slots"), "End the lookup that used these slots. Returns what abort() returns.")
      .def("drainable", [](const Tier& tier) { return DepartureArrays(tier.Drainable()); })
      .def(
          "drained",
          [](Tier& tier, const Array<std::int32_t>& slots) { tier.Drained(slots.data(), slots.size()); },
          py::arg("slots"))
      .def("find", &FindSlots<Tier>, py::arg("keys"),
           "Return the slots (int32) of keys (uint64), -1 where a row is not here.")
      .def(
          "remove",
          [](Tier& tier, const Array<std::int32_t>& slots) {
            WithoutLock(slots, [&](const std::int32_t* at, std::int64_t n) { tier.Remove(at, n); });
          },
          py::arg("slots"))
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
          py::arg("keys"), py::arg("next_use"), py::arg("now"),
          "Note the next use of keys. Returns the keys that are not here.")
      .def(
          "mark_dirty",
          [](Tier& tier, const Array<std::int32_t>& slots) {
            // The training thread marks rows. Getting the interpreter's lock back from a thread that plans
            // takes longer than marking some rows.
            constexpr py::ssize_t kUnlockFrom = 1 << 16;
            WithoutLock(
                slots, [&](const std::int32_t* at, std::int64_t n) { tier.MarkDirty(at, n); }, kUnlockFrom);
          },
          py::arg("slots"))
      .def(
          "mark_clean",
          [](Tier& tier, const Array<std::int32_t>& slots) { tier.MarkClean(slots.data(), slots.size()); },
          py::arg("slots"))
      .def(
          "set_dirty",
          [](Tier& tier, const Array<std::int32_t>& slots, const Array<std::uint8_t>& dirty) {
            if (slots.size() != dirty.size()) throw std::invalid_argument("slots and dirty differ in length");
            const std::uint8_t* const flags = dirty.data();
            WithoutLock(slots, [&](const std::int32_t* at, std::int64_t n) { tier.SetDirty(at, flags, n); });
          },
          py::arg("slots"), py::arg("dirty"))
      .def(
          "dirty_of",
          [](const Tier& tier, const Array<std::int32_t>& slots) {
            Array<std::uint8_t> out = Fresh<std::uint8_t>(slots.size());
            std::uint8_t* const to = out.mutable_data();
            WithoutLock(slots, [&](const std::int32_t* at, std::int64_t n) { tier.DirtyOf(at, n, to); });
            return out;
          },
          py::arg("slots"))
      .def(
          "keys_of",
          [](const Tier& tier, const Array<std::int32_t>& slots) {
            Array<std::uint64_t> out = Fresh<std::uint64_t>(slots.size());
            std::uint64_t* const to = out.mutable_data();
            WithoutLock(slots, [&](const std::int32_t* at, std::int64_t n) { tier.KeysOf(at, n, to); });
            return out;
          },
          py::arg("slots"))
      .def(
          "resident_slots",
          [](const Tier& tier, bool dirty, std::int64_t from, std::int64_t limit) {
            return Owned(tier.ResidentSlots(dirty, from, limit));
          },
          py::arg("only_dirty"), py::arg("start"), py::arg("limit"))
      .def_property_readonly("committed", &Tier::committed, "How many slots must have room for a row.")
      .def("table_rows", &Tier::TableRows,
           "Return the number of rows of every table that are here, as they are counted.")
      .def("dirty_rows", &Tier::DirtyRows, Unlocked(), "Return how many rows are dirty.")
      .def_property_readonly("capacity", &Tier::capacity)
      .def_property_readonly("lanes", &Tier::lanes)
      .def_property_readonly("overflow_in_use", &Tier::overflow_in_use)
      .def_property_readonly("metadata_bytes", &Tier::metadata_bytes)
      .def_property_readonly("policy_seconds", &Tier::policy_seconds)
      .def("__len__", &Tier::size);
}

}  // namespace

TIERSTORE_BINDINGS(tier) {
  py::register_exception<PolicyFault>(m, "PolicyFault", PyExc_RuntimeError);
  py::register_exception<OverflowFull>(m, "OverflowFull", PyExc_RuntimeError);
  BindShare(m);
  BindPlan(m);
  BindTier(m);
}

}  // namespace tierstore
