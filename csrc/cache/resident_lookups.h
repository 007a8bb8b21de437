// Lookups of rows in a tier that no row ever leaves. Where all rows of a batch are here, a plan would change
// nothing: such a lookup needs no plan, no pinned rows, and no lock of the caller. Where no other tier can
// have a row that is missing, the lookup itself adds the row, and needs the caller's lock for that.
//
// A lookup is one call, so that a signal handler of Python cannot cut it in two. What is to be counted
// of the lookup is kept until Take().
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "cache/batch.h"
#include "cache/tier_lane.h"
#include "common/page_allocator.h"

namespace tierstore {

// The rows of a batch: where each unique row is, and the positions that use it (cache/csr.h).
struct ResidentRows {
  std::shared_ptr<Batch> batch;
  PageVector<std::int32_t> slots, csr_start, csr_positions;
  std::int64_t missing = 0;  // slots that are -1, only after Read
};

// The memory of rows that are added, and the values with which they begin.
class NewRows {
 public:
  virtual ~NewRows() = default;
  // Gives the first `slots` slots memory. If it throws, nothing has changed.
  virtual void Commit(std::int64_t slots) const = 0;
  // Writes the first row of keys[i] to slots[i].
  virtual void Fill(const PageVector<std::int32_t>& slots, const PageVector<std::uint64_t>& keys) const = 0;
};

class ResidentLookups {
 public:
  // Lookups that are not taken yet.
  struct Counted {
    std::vector<std::shared_ptr<ResidentRows>> lookups;
    std::vector<std::int64_t> table_rows, table_hits;  // unique rows of each table, and how many were here
    std::int64_t positions = 0, hits = 0;              // and how many of them use rows that were here
    std::int64_t read_rows = 0;                        // unique rows of Read, which are in no other count
    double seconds = 0;                                // that Find and Add took
    double announce_seconds = 0, compute_seconds = 0;  // of AddSeconds
  };

  // The tier must have no share with a policy, and must outlive the object. `tables` is the number of tables.
  ResidentLookups(TierLane* tier, std::size_t tables)
      : tier_(*tier), tables_(tables), counted_(NothingCounted()) {}

  // A plan is under way between BeginPlan and EndPlan, one plan at a time. The plan adds rows between Hide
  // and Show only, and there Find finds nothing. Add adds nothing during the whole plan, which knows what was
  // missing.
  void BeginPlan() { Set(&planning_, true); }
  void EndPlan() { Set(&planning_, false); }
  void Hide() { Set(&hidden_, true); }
  void Show() { Set(&hidden_, false); }

  // Finds the rows of a batch. Returns null where a row is missing, or rows are hidden.
  std::shared_ptr<ResidentRows> Find(std::shared_ptr<Batch> batch);
  // Adds the missing rows and finds all rows. Returns null, with nothing changed, during a plan and where the
  // memory for more rows is refused: a plan then tells the user why. Hold the tier's lock.
  std::shared_ptr<ResidentRows> Add(std::shared_ptr<Batch> batch, const NewRows& rows);
  // Finds the slots of rows that are read outside of training, without positions. Returns null where Find
  // does, but rows may be missing if `may_miss`.
  std::shared_ptr<ResidentRows> Read(std::shared_ptr<Batch> batch, bool may_miss);
  // Counts what a lookup took beside Find: to remove repeated ids, and in kernels.
  void AddSeconds(double announce, double compute);
  // Returns whether so much waits to be counted that Take should be called.
  bool due() const;
  Counted Take();

 private:
  void Set(bool* flag, bool value);
  bool FindSlots(const Batch& batch, PageVector<std::int32_t>* slots, bool may_miss = false) const;
  bool AddSlots(const Batch& batch, const NewRows& rows, LanePlan* plan);
  void Count(std::shared_ptr<ResidentRows> rows, const PageVector<std::int32_t>& added, double seconds);
  Counted NothingCounted() const {
    Counted nothing;
    nothing.table_rows.assign(tables_, 0);
    nothing.table_hits.assign(tables_, 0);
    return nothing;
  }

  TierLane& tier_;
  const std::size_t tables_;
  mutable std::shared_mutex showing_;  // guards the flags, and the tier's index against Hide and Add
  bool planning_ = false;
  bool hidden_ = false;
  mutable std::mutex counting_;  // guards counted_
  Counted counted_;
};

}  // namespace tierstore
