// The window has the lookups that are announced but not yet planned, and knows the next use of their rows.
//
// A window of large lookups has shards: a hash of the key says which shard knows a row, and threads take a
// shard each. Tables of which such a lookup uses many rows have an entry for each id instead.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "cache/batch.h"
#include "cache/divided_keys.h"
#include "cache/probing.h"
#include "cache/reserved_memory.h"
#include "common/key.h"

namespace tierstore {

// A PendingLookup is a lookup of the window.
struct PendingLookup {
  std::int64_t seq;
  std::shared_ptr<const Batch> batch;
  PageVector<std::int32_t> next;  // how many lookups later the key is used again; 0: not in the window
  std::int64_t latest;            // the number of keys of which this lookup is the latest occurrence

  std::int64_t memory_bytes() const {
    return static_cast<std::int64_t>(batch->unique.size() * (sizeof(std::uint64_t) + sizeof(std::int32_t)) +
                                     batch->inverse.size() * sizeof(std::int32_t));
  }
};

// NewestLookup knows the lookups before the newest lookup, and collects which keys of the newest lookup occur
// in no lookup before. Lookups are numbered modulo 2^32.
class NewestLookup {
 public:
  NewestLookup(std::deque<PendingLookup>* before, std::uint32_t first, std::size_t keys);

  std::uint32_t first() const { return first_; }
  std::uint32_t ordinal() const { return first_ + static_cast<std::uint32_t>(before_.size()); }
  std::size_t lookups_before() const { return before_.size(); }
  // Returns whether a number is the number of a lookup before this one.
  bool IsBefore(std::uint32_t ordinal) const { return ordinal - first_ < before_.size(); }
  // Returns where a lookup before this one keeps the next use of its key `index`.
  std::int32_t* NextUse(std::uint32_t ordinal, std::uint32_t index) const {
    return &before_[ordinal - first_]->next[index];
  }
  void SetNextUse(std::uint32_t ordinal, std::uint32_t index) {
    *NextUse(ordinal, index) = static_cast<std::int32_t>(this->ordinal() - ordinal);
  }
  void SetFirst(std::int32_t position) { first_seen_[static_cast<std::size_t>(position)] = 1; }
  // Returns the keys that occur in no lookup before.
  PageVector<std::uint64_t> FirstSeen(const PageVector<std::uint64_t>& keys) const;
  // `superseded` has, for each lookup before, the number of keys of which it is no longer the latest
  // occurrence.
  void Count(const std::vector<std::int64_t>& superseded);

 private:
  std::vector<PendingLookup*> before_;
  std::uint32_t first_;
  PageVector<std::uint8_t> first_seen_;  // by position
};

// NewKeys are some keys of the newest lookup and their positions in the lookup; without positions they are
// its first keys.
struct NewKeys {
  std::span<const std::uint64_t> keys;
  std::span<const std::int32_t> positions;

  std::int32_t PositionOf(std::size_t i) const {
    return positions.empty() ? static_cast<std::int32_t>(i) : positions[i];
  }
};

// A WindowShard knows the latest occurrences of some keys.
class WindowShard {
 public:
  // Counts in `superseded`, for each lookup before the newest, the keys of which it is no longer the latest
  // occurrence.
  void Add(NewKeys added, NewestLookup* newest, std::vector<std::int64_t>* superseded);

  // Returns shards that divide the entries of `lookups` lookups from `first` on.
  std::vector<WindowShard> Divided(std::uint32_t first, std::size_t lookups) const;
  void Clear();
  std::int64_t memory_bytes() const { return static_cast<std::int64_t>(entries_.size() * sizeof(Entry)); }

  static constexpr std::size_t kShards = 16;
  static std::size_t ShardOf(std::uint64_t key) { return HashKey(key) % kShards; }  // not the bits of Home

 private:
  // An entry has the latest occurrence of a key: the number of the lookup, and the index in the lookup's
  // unique keys. The entry is dead once that lookup has left; its place then serves the same key again, or
  // another key. The entry has the key itself, so that comparing keys takes no further access to memory.
  struct Entry {
    std::uint64_t key = 0;
    std::uint32_t ordinal = 0;
    std::uint32_t index = kEmpty;

    // Returns whether the entry is of one of `lookups` lookups from `first_lookup` on.
    bool IsOf(std::uint32_t first_lookup, std::size_t lookups) const {
      return index != kEmpty && ordinal - first_lookup < lookups;
    }
  };
  static constexpr std::uint32_t kEmpty = ~std::uint32_t{0};

  std::size_t Home(std::uint64_t key) const {
    return HomePlace(static_cast<std::uint32_t>(HashKey(key) >> 32), entries_.size());
  }
  std::size_t Next(std::size_t at) const { return NextPlace(at, entries_.size()); }
  // Returns the entry of a key, or the place where the entry belongs.
  Entry* Find(std::uint64_t key, std::size_t home, const NewestLookup& newest);
  // Returns how many entries this many keys take at first.
  static std::size_t EntriesFor(std::size_t keys);
  // Takes an entry whose key has none.
  void Place(const Entry& entry);
  // Makes room for `keys` more entries beside those of `lookups` lookups from `first` on.
  void MakeRoom(std::size_t keys, std::uint32_t first, std::size_t lookups);
  // Removes the entries of all other lookups, in place.
  void RemoveDead(std::uint32_t first, std::size_t lookups);

  OwnArray<Entry> entries_;
  std::size_t used_ = 0;  // entries that are not empty, dead ones included
};

// WindowTables knows the latest occurrences of the keys of some tables, by id. Threads may add keys of
// different lines.
class WindowTables {
 public:
  // Takes the tables of which a lookup has so many rows that entries by id take little more memory than
  // entries by hash: the window has more rows of such a table than one lookup. No occurrence is known then.
  void Choose(std::span<const std::uint64_t> keys);
  bool empty() const { return tables_.empty(); }
  bool Has(std::uint64_t key) const {
    const std::uint32_t table = KeyTable(key);
    return table < tables_.size() && KeyId(key) < tables_[table].ids;
  }
  // A line of the processor's cache has the entries of this many ids.
  static constexpr std::uint64_t kIdsInLine = 8;

  // Does what WindowShard::Add does. The tables have all of these keys.
  void Add(NewKeys added, NewestLookup* newest, std::vector<std::int64_t>* superseded);
  // Gives all tables up.
  void Clear();
  std::int64_t memory_bytes() const { return static_cast<std::int64_t>(entries_.size() * sizeof(Entry)); }

 private:
  struct Entry {
    std::uint32_t ordinal = 0;
    std::uint32_t index = kEmpty;
  };
  static constexpr std::uint32_t kEmpty = ~std::uint32_t{0};
  static constexpr std::uint64_t kIdsPerRow = 16;
  static constexpr std::uint64_t kMostEntries = std::uint64_t{1} << 19;  // 4 MiB
  // The entries of a table.
  struct Table {
    std::uint64_t begin = 0, ids = 0;
  };
  Entry* EntryOf(std::uint64_t key) const {
    return entries_.data() + tables_[KeyTable(key)].begin + KeyId(key);
  }

  std::vector<Table> tables_;
  OwnArray<Entry> entries_;
};

class Window {
 public:
  // Where nobody asks when rows are used, `knows_uses` is false: the window then has its lookups alone, and
  // returns no keys and no next uses.
  explicit Window(bool knows_uses) : knows_uses_(knows_uses) {}
  bool knows_uses() const { return knows_uses_; }

  // Adds a lookup; sequence numbers must increase. Returns the keys that occur in no earlier lookup of the
  // window: if they are resident, their tier learns now that they are used at `seq`.
  PageVector<std::uint64_t> Announce(std::int64_t seq, std::shared_ptr<const Batch> batch);

  // Takes the oldest lookup, which must be `seq`, out of the window, and returns the next use of each of its
  // unique keys (kNotKnown where the window has none).
  PageVector<std::int64_t> Take(std::int64_t seq);

  // Forgets all lookups; returns the keys whose announced use will not come.
  PageVector<std::uint64_t> Clear();

  // The bytes that the index takes per distinct row, on average.
  static constexpr double kBytesPerRow = 16.0 * 5 / 3 * 17 / 16;

  std::int64_t lookups() const { return static_cast<std::int64_t>(pending_.size()); }
  std::int64_t distinct_rows() const { return live_; }
  // Returns the bytes that the window takes, its lookups included, after its last change. Any thread may ask
  // at any time.
  std::int64_t memory_bytes() const { return memory_bytes_.load(std::memory_order_relaxed); }

 private:
  void Add(const PageVector<std::uint64_t>& keys, NewestLookup* newest);
  // Returns each key of the lookups once, in the order of latest occurrences.
  PageVector<std::uint64_t> LatestKeys() const;
  void CountBytes();
  std::size_t PartOf(std::uint64_t key) const;

  bool knows_uses_;
  std::deque<PendingLookup> pending_;
  std::uint32_t first_ordinal_ = 0;  // of pending_.front()
  std::vector<WindowShard> shards_ = std::vector<WindowShard>(1);
  WindowTables tables_;
  bool is_new_ = true;  // whether no lookup was added since the window was made or cleared
  std::int64_t live_ = 0;
  std::int64_t pending_bytes_ = 0;  // of the lookups
  std::atomic<std::int64_t> memory_bytes_{0};
};

}  // namespace tierstore
