// The window: lookups that are announced but not yet planned. It knows the next use of every row in it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "cache/batch.h"
#include "cache/probing.h"
#include "cache/reserved_memory.h"

namespace tierstore {

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

  std::int64_t lookups() const { return static_cast<std::int64_t>(pending_.size()); }
  std::int64_t distinct_rows() const { return live_; }
  std::int64_t memory_bytes() const;

 private:
  struct Pending {
    std::int64_t seq;
    std::shared_ptr<const Batch> batch;
    PageVector<std::int32_t> next;  // how many lookups later the key is used again; 0: not in the window
    std::int64_t latest;            // keys of which this lookup is the latest occurrence
  };
  // The latest occurrence of a key: number of the lookup modulo 2^32, index in its unique keys. The entry is
  // dead once that lookup has left; its place serves the same key again, or another one. The key itself is
  // here, so that comparing it takes no further access to memory.
  struct Entry {
    std::uint64_t key = 0;
    std::uint32_t ordinal = 0;
    std::uint32_t index = kEmpty;
  };
  static constexpr std::uint32_t kEmpty = ~std::uint32_t{0};

  bool IsLive(const Entry& entry) const { return entry.ordinal - first_ordinal_ < pending_.size(); }
  std::size_t Home(std::uint64_t key) const;
  std::size_t Next(std::size_t at) const { return NextPlace(at, entries_.size()); }
  void Rebuild(std::int64_t extra);

  std::deque<Pending> pending_;
  std::uint32_t first_ordinal_ = 0;  // of pending_.front()
  OwnArray<Entry> entries_;
  std::int64_t used_ = 0;  // entries that are not empty, dead ones included
  std::int64_t live_ = 0;
};

}  // namespace tierstore
