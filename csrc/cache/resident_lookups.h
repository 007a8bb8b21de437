// Looks up rows in a tier that no row ever leaves. Where all rows of a batch are here, a plan would change
// nothing: such a lookup needs no plan, no pinned rows, and no lock of the caller. Where no other tier can
// have a row that is missing, the lookup itself adds the row, and needs the caller's lock to do so.
//
// A lookup is one call, so that a signal handler of Python cannot cut the lookup in two. The lookup's numbers
// for the statistics are kept until Take().
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "cache/batch.h"
#include "cache/tier.h"
#include "common/page_allocator.h"

namespace tierstore {

// ResidentRows says where each unique row of a batch is, and which positions use the row (cache/csr.h).
struct ResidentRows {
  std::shared_ptr<Batch> batch;
  PageVector<std::int32_t> slots, csr_start, csr_positions;
  std::int64_t missing = 0;  // slots that are -1, only after Read
};

// NewRows gives memory to rows that are added, and writes their first values.
class NewRows {
 public:
  virtual ~NewRows() = default;
  // Gives the first `slots` slots memory. If Commit throws, nothing has changed.
  virtual void Commit(std::int64_t slots) const = 0;
  // Writes the first row of keys[i] to slots[i].
  virtual void Fill(const PageVector<std::int32_t>& slots, const PageVector<std::uint64_t>& keys) const = 0;
};

class ResidentLookups {
 public:
  // Counted has the numbers of lookups that Take has not returned yet.
  struct Counted {
    std::vector<std::shared_ptr<ResidentRows>> lookups;
    std::vector<std::int64_t> table_rows, table_hits;  // unique rows of each table, and how many were here
    std::int64_t positions = 0, hits = 0;              // and how many of them use rows that were here
    std::int64_t read_rows = 0;                        // unique rows of Read, which are in no other count
    double seconds = 0;                                // that Find and Add took
    double announce_seconds = 0, compute_seconds = 0;  // of AddSeconds
  };

  // The tier must have no share with a policy, and must outlive the object. `tables` is the number of tables.
  ResidentLookups(Tier* tier, std::size_t tables)
      : tier_(*tier), lane_(tier->only_lane()), tables_(tables), counted_(NothingCounted()) {}

  // A plan is under way between BeginPlan and EndPlan, one plan at a time. The plan adds rows between Hide
  // and Show only, and in between Find finds nothing. Add adds nothing during the whole plan, since the plan
  // has found out already which rows are missing.
  void BeginPlan() { Set(&planning_, true); }
  void EndPlan() { Set(&planning_, false); }
  void Hide() { Set(&hidden_, true); }
  void Show() { Set(&hidden_, false); }

  // Finds the rows of a batch. Returns null where a row is missing, or rows are hidden.
  std::shared_ptr<ResidentRows> Find(std::shared_ptr<Batch> batch);
  // Adds the missing rows and finds all rows. Returns null, with nothing changed, in a tier of several lanes,
  // during a plan, and where the memory for more rows is refused: a plan then tells the user why. Hold the
  // tier's lock.
  std::shared_ptr<ResidentRows> Add(std::shared_ptr<Batch> batch, const NewRows& rows);
  // Finds the slots of rows that are read outside of training, without positions. Returns null where Find
  // does, but rows may be missing if `may_miss`.
  std::shared_ptr<ResidentRows> Read(std::shared_ptr<Batch> batch, bool may_miss);
  // Counts the time that a lookup took beside Find: to remove repeated ids, and in kernels.
  void AddSeconds(double announce, double compute);
  // Returns whether so many lookups wait to be counted that Take should be called.
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

  Tier& tier_;
  TierLane* const lane_;  // the tier's only one; null where the tier has several
  const std::size_t tables_;
  mutable std::shared_mutex showing_;  // guards the flags, and the tier's index against Hide and Add
  bool planning_ = false;
  bool hidden_ = false;
  mutable std::mutex counting_;  // guards counted_
  Counted counted_;
};

}  // namespace tierstore
