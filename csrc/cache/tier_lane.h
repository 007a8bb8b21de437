// A lane has slots of a memory tier, the index that says which slot holds which key, and the policies that
// choose victims. The rows at these slots belong to a device (bindings/host_rows.h), of which the tier knows
// nothing.
//
// One thread plans at a time and holds the tier's lock (the caller's) while it calls anything here except
// MarkDirty, which the computing thread calls for slots that its own unreleased lookup pins. The
// tier hands out slots; the caller moves the rows, before it calls anything else.
//
// The slots are divided into shares, each with a policy of its own that numbers its slots from 0; a table has
// its rows in one share. A share without a policy holds every row that it is given (resident
// tables, or a tier that holds all rows).
//
// Slots 0 .. capacity-1 belong to the shares. The slots behind them are overflow slots: they hold rows that
// were not admitted, and rows of a batch that does not fit. The tier counts the lookups that use such a row;
// the row leaves through Drainable(). A plan counts it as a miss, so that what the plan decides does not
// depend on when a lookup was released. If the plan gives the row a slot of a share (its home), the row moves
// there when no lookup uses it any more.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cache/lane_ids.h"
#include "cache/policy.h"
#include "cache/reserved_memory.h"
#include "cache/slot_index.h"
#include "common/key.h"
#include "common/page_allocator.h"

namespace tierstore {

struct ShareConfig {
  std::int64_t capacity = 0;  // slots
  PolicyHooks policy;
  AdmissionHook filter;
};

struct LaneConfig {
  std::int64_t overflow_slots = 0;     // slots for which address space is reserved behind the shares' slots
  bool grows = false;                  // memory is taken as slots are first used, not at once
  std::vector<ShareConfig> shares;     // at least one share; a tier that grows has one only
  std::vector<std::int32_t> share_of;  // the share of each table; further tables belong to share 0
  LaneIds ids = {};                    // of its rows
};

// More rows are in use at once than a tier has slots, its overflow slots included.
class OverflowFull : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Rows that leave a tier, in the order in which they must be copied out.
struct Departures {
  PageVector<std::int32_t> slots;
  PageVector<std::uint64_t> keys;
  PageVector<std::uint8_t> dirty;
  PageVector<std::int64_t> next_use;

  void Reserve(std::size_t rows);
};

// Rows that are to be copied from slot to slot; no slot occurs twice.
struct Moves {
  PageVector<std::int32_t> from, to;
};

// What a plan wants of one share. The share's misses are [begin, end) of the plan's misses, refused misses
// last.
struct SharePlan {
  std::int64_t begin = 0, end = 0;
  std::int64_t needed = 0;
  std::int64_t refused = 0;
};

struct LanePlan {
  std::int64_t now = 0;
  std::vector<SharePlan> shares;
  PageVector<std::int32_t> slots;   // where every unique key's row is, valid after Assign
  PageVector<std::int32_t> misses;  // indices of unique keys without a slot, share by share
  PageVector<std::int32_t> absent;  // misses without an overflow slot: the caller fills them
  Departures victims;               // to be copied out before the misses are filled
  std::int64_t needed = 0;          // victims still to be found; misses without one overflow
  std::int64_t refused = 0;         // misses that get no slot but an overflow slot
  PageVector<std::int64_t> next_use;
  std::vector<std::int64_t> table_rows, table_hits;  // unique keys of each table, and how many were here

  // Returns the misses that find no slot of their share. Call it after Evict.
  PageVector<std::int32_t> Unplaced() const;
};

class TierLane {
 public:
  // The bytes that a slot costs beside its row and its policy: key, last use, next use, dirty flag, index
  // entry, free list.
  static constexpr double kBytesPerSlot = 8 + 8 + 8 + 1 + 1 + 4 + SlotIndex::kBytesPerSlot;

  explicit TierLane(const LaneConfig& config);

  // Planning. `keys` has no repeats; `absent` says that no key is here. The plan has the next use of
  // each key, or no next use at all when no next use is known. Begin touches the hits. Evict looks for the
  // victims that are still needed, among slots last used before `pinned_since`; lookups before `pinned_since`
  // must have been released here. Prepare takes the memory that Assign needs, so that Assign itself cannot
  // fail, and returns how many slots must have room for a row by then. Assign gives every miss a slot (an
  // overflow slot if it is refused or past capacity) and forgets the victims. Between Begin and Assign all
  // rows are still found where they were. Evict throws PolicyFault, Prepare AddressSpaceError or
  // OverflowFull; the caller must abort the plan then.
  void Begin(const std::uint64_t* keys, std::int64_t n, std::int64_t now, bool absent, LanePlan* plan);
  std::int64_t Evict(std::int64_t pinned_since, LanePlan* plan);
  std::int64_t Prepare(bool use_overflow, const LanePlan& plan);
  void Assign(const std::uint64_t* keys, bool use_overflow, LanePlan* plan);
  // Ends a plan before Assign, when rows could not be moved: the victims stay. The caller moves the returned
  // rows, as after Release.
  Moves Abort(LanePlan* plan);

  // A lookup that used `slots` is over. Rows at overflow slots without further users become drainable, or are
  // returned to be moved home.
  Moves Release(const std::int32_t* slots, std::int64_t n);
  // Returns rows at overflow slots that no lookup uses any more. Once these rows are written down, Drained()
  // forgets them. When no overflow slot is in use, no overflow slot needs memory any more.
  Departures Drainable() const;
  void Drained(const std::int32_t* slots, std::int64_t n);

  void Find(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) const {
    index_.Find(keys, n, slots);
  }
  const SlotIndex& index() const { return index_; }
  // Takes rows out of the tier other than by eviction; `slots` must be resident slots of shares.
  void Remove(const std::int32_t* slots, std::int64_t n);
  // Notes that these keys are used at `next_use`, as the window has learned. Returns the keys that
  // are not here.
  PageVector<std::uint64_t> Announce(const std::uint64_t* keys, std::int64_t n, std::int64_t next_use,
                                     std::int64_t now);

  void MarkDirty(const std::int32_t* slots, std::int64_t n);
  void MarkClean(const std::int32_t* slots, std::int64_t n);
  void SetDirty(const std::int32_t* slots, const std::uint8_t* dirty, std::int64_t n);
  // Returns at most `limit` slots that have rows, from slot `from` on, in increasing order.
  PageVector<std::int32_t> ResidentSlots(bool only_dirty, std::int64_t from, std::int64_t limit) const;

  // Returns whether a slot, which may be of any number, has a row.
  bool HasRow(std::int32_t slot, bool only_dirty) const {
    return slot < committed_ && resident_[slot] == kRow && (dirty_[slot] != 0 || !only_dirty);
  }

  std::uint64_t key(std::int32_t slot) const { return row_[slot].key; }
  const std::uint8_t* dirty() const { return dirty_.data(); }
  std::int64_t capacity() const { return capacity_; }
  // Returns whether some share has a policy, so that rows may leave.
  bool evicts() const { return evicts_; }
  // Returns how many tables have shares.
  std::size_t tables() const { return config_.share_of.size(); }
  // Returns the number of rows of each table at the shares' slots. Any thread may ask at any time.
  std::vector<std::int64_t> TableRows() const { return {table_rows_.begin(), table_rows_.end()}; }
  // Returns how many rows are dirty, those at overflow slots included.
  std::int64_t DirtyRows() const;
  // Returns how many slots must have room for a row.
  std::int64_t committed() const { return committed_; }
  std::int64_t size() const { return index_.size(); }
  std::int64_t overflow_in_use() const;
  std::int64_t metadata_bytes() const;
  // Returns the time spent in the hooks of policy and filter.
  double policy_seconds() const { return policy_seconds_; }

 private:
  void CommitSlots(std::int64_t slots);
  void FindBlock(const std::uint64_t* keys, std::int64_t from, std::int64_t n, std::int32_t* slots,
                 bool last_use) const;
  // Fetches the elements that the arrays have for a slot into the processor's cache. Slots are in no order.
  static constexpr std::size_t kAhead = 24;
  void Prefetch(std::int32_t slot) const;
  // A share and its free slots. Its slots are begin .. begin + capacity - 1.
  struct Share {
    ShareConfig config;
    std::int64_t begin;
    std::vector<std::int32_t> free = {};  // slots given back; used before fresh ones
    std::int64_t fresh = 0;               // slots that were used so far

    std::int64_t available() const {
      return static_cast<std::int64_t>(free.size()) + config.capacity - fresh;
    }
  };
  // Rows of one share, as its policy gets them.
  struct Uses {
    PageVector<std::int32_t> slots;  // numbered from the share's first
    PageVector<std::uint64_t> keys;
    PageVector<std::int64_t> next_use;

    void Reserve(std::size_t rows);
    void Add(std::int32_t slot, std::uint64_t key, std::int64_t next);
    auto size() const { return static_cast<std::int64_t>(slots.size()); }
  };
  static std::vector<Share> SharesOf(const LaneConfig& config);
  // Returns of each table whether its rows never leave.
  std::vector<bool> StayingTables() const;
  std::size_t ShareOf(std::uint64_t key) const {
    if (shares_.size() == 1) return 0;
    const std::uint32_t table = KeyTable(key);
    return table < config_.share_of.size() ? static_cast<std::size_t>(config_.share_of[table]) : 0;
  }
  void Tell(PolicyHooks::Use hook, const Share& share, const Uses& uses, std::int64_t now);
  void GroupMisses(const std::uint64_t* keys, LanePlan* plan) const;
  void Admit(const std::uint64_t* keys, const Share& share, SharePlan* wanted, LanePlan* plan);
  std::int64_t EvictFrom(const Share& share, std::int64_t needed, std::int64_t pinned_since, LanePlan* plan);
  // Returns what is wrong with a slot that the policy wants to evict; null if nothing is.
  const char* Fault(const Share& share, std::int32_t slot, std::int64_t pinned_since) const;
  void TakeVictim(std::int32_t slot, Departures* victims);
  // Counts a row that gets a slot of a share (1) or leaves it (-1). One thread at a time changes a tier, so
  // the sum needs no locked instruction.
  void CountRow(std::uint64_t key, std::int64_t change) {
    const std::uint32_t table = KeyTable(key);
    if (table >= table_rows_.size()) return;
    std::atomic<std::int64_t>& rows = table_rows_[table];
    rows.store(rows.load(std::memory_order_relaxed) + change, std::memory_order_relaxed);
  }
  std::int32_t TakeSlot(Share* share);
  std::int32_t TakeOverflowSlot();
  std::int32_t MoveHome(std::int32_t slot);
  void ForgetOverflowSlot(std::int32_t slot);
  bool Resident(std::int32_t slot) const { return resident_[static_cast<std::size_t>(slot)] != kEmpty; }

  // What a slot holds; kExpected: its row is still at an overflow slot.
  enum Content : std::uint8_t { kEmpty, kRow, kExpected };
  // Key and next use lie side by side, since a lookup by key then reads or changes the next use.
  struct Row {
    std::uint64_t key;
    std::int64_t next_use;
  };

  LaneConfig config_;
  std::vector<Share> shares_;
  bool evicts_;            // whether a share has a policy
  std::int64_t capacity_;  // slots of all shares
  std::size_t limit_;      // slots, overflow slots included, for which address space is reserved
  ReservedArray<Row> row_;
  ReservedArray<std::int64_t> last_use_;  // not in `row_`, because policies get this array
  ReservedArray<std::uint8_t> dirty_;
  ReservedArray<std::uint8_t> resident_;
  SlotIndex index_;
  std::int64_t committed_ = 0;                         // slots with memory behind them
  std::vector<std::atomic<std::int64_t>> table_rows_;  // slots of shares that are not empty, by table
  std::vector<std::int32_t> overflow_users_;  // lookups that use each overflow slot; -1 when it is free
  std::vector<std::int32_t> overflow_home_;   // the share's slot that its row was given, or -1
  std::vector<std::int32_t> overflow_free_;
  std::vector<std::int32_t> overflow_drainable_;
  double policy_seconds_ = 0;
};

}  // namespace tierstore
