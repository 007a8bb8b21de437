// Where the rows of one table are: an exact map from 48-bit ids to 32-bit locations in 10 bytes per entry.
//
// Open addressing over one array that is kept sorted by a permutation h of the id, so the id is recovered
// from its entry: no false hits, no reads to tell rows apart, and the keys can be listed. An entry lies at
// home(h) = h·capacity/2^48 or, when that is taken, to the left of it, after all entries with smaller h.
//
// Growth happens in place: the mapping is extended, and entries move from the right end to their new, never
// smaller, positions, some with every insertion; so there is no long pause and never a second copy. Entries
// with h ≥ bound_ have moved, the others lie at or left of old_end_. Load is 0.84 to 0.93 once past the first
// thousands, which makes 10.8 to 11.9 bytes per row.
//
// Not thread-safe. Memory is mapped, not allocated: what bytes() says is what the process holds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tierstore {

class TableIndex {
 public:
  static constexpr std::uint32_t kAbsent = 0xffffffffu;
  static constexpr std::uint32_t kMaxLocation = 0xfffffffdu;

  TableIndex();
  ~TableIndex();
  TableIndex(const TableIndex&) = delete;
  TableIndex& operator=(const TableIndex&) = delete;

  // Location of each id, or kAbsent. Only the lower 48 bits of `ids` count, here and below.
  void Find(const std::uint64_t* ids, std::size_t n, std::uint32_t* locations) const;
  std::uint32_t Find(std::uint64_t id) const;

  // Sets locations (at most kMaxLocation); `previous` gets what was there or kAbsent. Throws std::bad_alloc,
  // with the entries before the one that failed set.
  void Put(const std::uint64_t* ids, const std::uint32_t* locations, std::size_t n, std::uint32_t* previous);
  std::uint32_t Put(std::uint64_t id, std::uint32_t location);

  // Appends up to `limit` entries from `cursor` (0 at first) on; returns the next cursor, or kEnd. Entries
  // that were there at the start and stay are listed once, whatever is put meanwhile. The order jumps about
  // in h: whoever puts the ids into another index, entry by entry, would otherwise fill it from one end, and
  // each would push aside all before it.
  static constexpr std::uint64_t kEnd = ~std::uint64_t{0};
  std::uint64_t List(std::uint64_t cursor, std::size_t limit, std::vector<std::uint64_t>& ids,
                     std::vector<std::uint32_t>* locations) const;

  // All entries in descending order of h, for snapshots: Dump copies the next ones (0 at the end) and moves
  // the cursor, which begins as DumpBegin(); nothing may be put meanwhile. Restore fills an empty index:
  // Reserve, then Append in the same order; false when an entry is not in order or one too many, and the
  // index must be discarded.
  struct Entry {
    std::uint64_t hash;
    std::uint32_t location;
  };
  std::int64_t DumpBegin() const {
    return static_cast<std::int64_t>(slack_ + std::max(capacity_, old_capacity_));
  }
  std::size_t Dump(std::int64_t& cursor, Entry* out, std::size_t limit) const;
  void Reserve(std::size_t entries);
  bool Append(const Entry* entries, std::size_t n);

  std::size_t size() const { return count_; }
  std::size_t bytes() const { return mapped_bytes_; }

  // Bijection of 48 bits, and its inverse.
  static std::uint64_t Permute(std::uint64_t id);
  static std::uint64_t Unpermute(std::uint64_t h);

 private:
  using Position = std::int64_t;  // of an entry in the array
  static constexpr std::size_t kEntryBytes = 10;
  static constexpr int kStripeShift = 30;  // List takes 2^18 stripes of h one after the other
  static constexpr std::uint64_t kWithinStripe = (std::uint64_t{1} << kStripeShift) - 1;

  std::byte* At(Position p) const { return base_ + p * static_cast<Position>(kEntryBytes); }
  bool IsEmpty(Position p) const;
  std::uint64_t HashAt(Position p) const;
  std::uint32_t LocationAt(Position p) const;
  void Set(Position p, std::uint64_t h, std::uint32_t location);
  void Clear(Position p);

  static std::uint64_t SwapStripe(std::uint64_t h);
  Position Home(std::uint64_t h) const;
  Position Seek(std::uint64_t h) const;  // of h, or of an empty entry
  void Insert(std::uint64_t h, std::uint32_t location);
  void Map(std::size_t slack, std::size_t capacity);
  void Extend(std::size_t bytes);
  void BeginGrowth();
  void MoveSome(std::size_t positions);
  void WidenSlack();

  std::byte* base_ = nullptr;
  std::size_t mapped_bytes_ = 0, reserved_bytes_ = 0;  // the latter in address space
  std::size_t slack_ = 0;                              // positions left of the first home
  std::size_t capacity_ = 0;                           // homes of entries with h ≥ bound_
  std::size_t count_ = 0;

  // While growing; otherwise old_end_ is -1 and bound_ 0.
  std::size_t old_capacity_ = 0;
  std::uint64_t bound_ = 0;
  Position old_end_ = -1;
  Position new_begin_ = 0;  // of the leftmost entry that has moved
  std::size_t debt_ = 0;    // positions that should have been moved by now
};

}  // namespace tierstore
