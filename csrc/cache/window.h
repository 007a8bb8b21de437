// The window: lookups that are announced but not yet planned. It knows the next use of every row in it.
//
// A window of large lookups has shards: a hash of the key says which one knows a row, and threads take one
// each.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "cache/batch.h"
#include "cache/probing.h"
#include "cache/reserved_memory.h"

namespace tierstore {

// A lookup of the window.
struct PendingLookup {
  std::int64_t seq;
  std::shared_ptr<const Batch> batch;
  PageVector<std::int32_t> next;  // how many lookups later the key is used again; 0: not in the window
  std::int64_t latest;            // keys of which this lookup is the latest occurrence
};

// The latest occurrences of some keys.
class WindowShard {
 public:
  // The newest lookup, the lookups before it, and which of its keys occur in none of them. Lookups are
  // numbered modulo 2^32.
  struct Added {
    const std::uint64_t* keys;
    std::vector<PendingLookup*> before;
    std::uint32_t first;
    std::uint8_t* first_seen;
  };

  // Adds `count` keys of the newest lookup: those at `positions`, or its first ones without positions. Counts
  // in `superseded`, by lookup before it, the keys that it had latest.
  void Add(const Added& added, const std::int32_t* positions, std::size_t count,
           std::vector<std::int64_t>* superseded);

  // The keys of `lookups` lookups from `first` on.
  PageVector<std::uint64_t> Keys(std::uint32_t first, std::size_t lookups) const;
  // The shards that divide the entries of those lookups.
  std::vector<WindowShard> Divided(std::uint32_t first, std::size_t lookups) const;
  void Clear();
  std::int64_t memory_bytes() const { return static_cast<std::int64_t>(entries_.size() * sizeof(Entry)); }

  static constexpr std::size_t kShards = 16;
  static std::size_t ShardOf(std::uint64_t key);

 private:
  // The latest occurrence of a key: number of the lookup, index in its unique keys. The entry is dead once
  // that lookup has left; its place serves the same key again, or another one. The key itself is here, so
  // that comparing it takes no further access to memory.
  struct Entry {
    std::uint64_t key = 0;
    std::uint32_t ordinal = 0;
    std::uint32_t index = kEmpty;
  };
  static constexpr std::uint32_t kEmpty = ~std::uint32_t{0};

  std::size_t Home(std::uint64_t key) const;
  std::size_t Next(std::size_t at) const { return NextPlace(at, entries_.size()); }
  PageVector<Entry> Live(std::uint32_t first, std::size_t lookups) const;
  // Makes room for `live`, which become the entries, and `extra` more.
  void Rebuild(const PageVector<Entry>& live, std::size_t extra);

  OwnArray<Entry> entries_;
  std::size_t used_ = 0;  // entries that are not empty, dead ones included
};

class Window {
 public:
  // Adds a lookup; sequence numbers must increase. Returns the keys that occur in no earlier lookup of the
  // window: if they are resident, their tier learns now that they are used at `seq`.
  PageVector<std::uint64_t> Announce(std::int64_t seq, std::shared_ptr<const Batch> batch);

  // Takes the oldest lookup, which must be `seq`, out of the window, and returns the next use of each of its
  // unique keys (kNotKnown where the window has none).
  PageVector<std::int64_t> Take(std::int64_t seq);

  // Forgets all lookups; returns the keys whose announced use will not come.
  PageVector<std::uint64_t> Clear();

  // What the index takes per distinct row, on average.
  static constexpr double kBytesPerRow = 16.0 * 5 / 3 * 17 / 16;

  std::int64_t lookups() const { return static_cast<std::int64_t>(pending_.size()); }
  std::int64_t distinct_rows() const { return live_; }
  std::int64_t memory_bytes() const;

 private:
  void AddShards(const WindowShard::Added& added, std::size_t keys);

  std::deque<PendingLookup> pending_;
  std::uint32_t first_ordinal_ = 0;  // of pending_.front()
  std::vector<WindowShard> shards_ = std::vector<WindowShard>(1);
  std::int64_t live_ = 0;
};

}  // namespace tierstore
