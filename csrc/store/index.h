// Holds the locations of one table's rows: an exact map from 48-bit ids to 40-bit locations. An entry takes
// 10 bytes, or 9 where there are many entries.
//
// The map is an array with open addressing, kept sorted by a permutation h of the id, so the id is recovered
// from its entry. Hence there are no false hits, no reads to tell rows apart, and the keys can be listed. An
// entry lies at home(h) = h·capacity/2^48 or, when that place is taken, to the left of its home, after all
// entries with smaller h.
//
// The position of an entry implies most of the upper bits of its h. A larger index therefore stores only 40
// of the 48 bits, has more empty positions in the same memory, and grows in longer strides, which makes
// insertions fast. Its entries must lie within reach_ positions of their homes. Only ids that
// somebody chose so lie farther away; then the index goes back to entries with all bits.
//
// A location takes 4 bytes of an entry, as long as no location needs more. From 2^26 rows on 32 bits of h are
// enough, and a location takes 5 of the 9 bytes. A smaller index that gets a location beyond 32 bits is
// copied once into entries that are a byte longer.
//
// Every index begins with the same permutation, so equal stores list their keys in the same order and save
// equal snapshots. Ids that are chosen to crowd the index make runs of neighbours that other ids never make.
// At such a run the index is sorted anew, once, by a random permutation. From then on the index has an order
// of its own and cannot be saved.
//
// Growth happens in place: the mapping is extended, and entries move from the right end to their new, never
// smaller, positions, some with every insertion; so there is no long pause and no second copy. Entries with
// h ≥ bound_ have moved, the other entries lie at or left of old_end_. Moving also divides the bits of
// entries anew, at 2^26 rows. Only where entries get another length, at 2^16 rows, all are copied at once.
// Past the first thousands the index takes 10.2 to 11.9 bytes per row.
//
// Not thread-safe. Memory is mapped, not allocated: bytes() is what the process holds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "store/index_memory.h"

namespace tierstore {

using Location = std::uint64_t;

class TableIndex {
 public:
  static constexpr unsigned kLocationBits = 40;
  static constexpr Location kAbsent = ~Location{0};
  static constexpr Location kMaxLocation = (Location{1} << kLocationBits) - 3;

  TableIndex();
  TableIndex(TableIndex&&) = default;
  TableIndex& operator=(TableIndex&&) = default;

  // Gives the location of each id, or kAbsent. Only the lower 48 bits of `ids` count, here and below.
  void Find(const std::uint64_t* ids, std::size_t n, Location* locations) const;
  Location Find(std::uint64_t id) const;

  // Sets locations (at most kMaxLocation); `previous` gets the former location or kAbsent. Throws
  // std::bad_alloc after setting the entries before the failed one.
  void Put(const std::uint64_t* ids, const Location* locations, std::size_t n, Location* previous);
  Location Put(std::uint64_t id, Location location);
  // Takes an id out and returns its location or kAbsent. The index must not be growing (IsGrowing).
  Location Erase(std::uint64_t id);
  // Growth goes on with insertions, and by this many positions with GoOnGrowing.
  bool IsGrowing() const { return old_end_ >= 0; }
  void GoOnGrowing(std::size_t positions) {
    if (IsGrowing()) MoveSome(positions);
  }
  // Returns whether less than a quarter of the memory is in use, and the memory is large.
  bool IsSparse() const;
  // Returns an empty index of the same order, with as much memory as these entries need.
  TableIndex Smaller() const;
  // Fetches what Find or Put of the id will read into the processor's cache.
  void Prefetch(std::uint64_t id) const;

  // A Permutation is a bijection of 48 bits.
  struct Permutation {
    std::uint64_t flip, factors[2], inverses[2];

    static Permutation Random();
    std::uint64_t Of(std::uint64_t id) const;
    std::uint64_t IdOf(std::uint64_t h) const;
  };

  // Appends up to `limit` entries from `cursor` (0 at first) on; returns the next cursor, or kEnd. Entries
  // that were there at the start and stay are listed once, whatever is put meanwhile, while the index keeps
  // its order. Then all ids with a smaller ListPlace than the cursor were listed, and no other ids. The list
  // jumps about in h: a caller that puts the ids into another index, entry by entry, would otherwise fill it
  // from one end, where each entry pushes aside all entries before it.
  static constexpr std::uint64_t kEnd = ~std::uint64_t{0};
  std::uint64_t List(std::uint64_t cursor, std::size_t limit, std::vector<std::uint64_t>& ids,
                     std::vector<Location>* locations) const;
  static std::uint64_t ListPlace(const Permutation& order, std::uint64_t id);

  // A dump has all entries in descending order of h, for snapshots. Dump copies the next entries (0 at the
  // end) and moves the cursor, which begins as DumpBegin(); nothing may be put meanwhile. Restore fills an
  // empty index: Reserve, then Append in the same order; false when an entry is not in order, and the index
  // must be discarded. Another index can restore a dump only if HasOwnOrder is false.
  struct Entry {
    std::uint64_t hash;
    Location location;
  };
  std::int64_t DumpBegin() const {
    return static_cast<std::int64_t>(slack_ + std::max(capacity_, old_capacity_));
  }
  std::size_t Dump(std::int64_t& cursor, Entry* out, std::size_t limit) const;
  // Makes a dump while entries are put between calls and the index keeps its order: copies the next entries
  // with hashes below `bound` (kNoBound at first), which becomes the hash of the last entry.
  static constexpr std::uint64_t kNoBound = std::uint64_t{1} << 48;
  std::size_t DumpBelow(std::uint64_t& bound, Entry* out, std::size_t limit) const;
  // Gives the first entry of a Dump; false when there is none. `end` begins as DumpBegin(), and nothing may
  // be put while `end` is needed.
  bool First(std::int64_t& end, Entry& out) const;
  void Reserve(std::size_t entries, Location most = 0);
  bool Append(const Entry* entries, std::size_t n);
  // Restores a dump from several threads, after Reserve for all entries with locations up to `most`: each
  // thread places pieces of the dump. What lies at the end of a piece goes to `spilled`, for Settle, which
  // comes after all pieces with the number of all entries; the caller sees to it that pieces follow one
  // another in descending order. False when the entries are not in order, or not such as this index was
  // reserved for: then Append may still restore the dump, into another index.
  bool Place(const Entry* entries, std::size_t n, std::vector<Entry>& spilled);
  void Settle(const std::vector<Entry>& spilled, std::size_t entries);

  bool HasOwnOrder() const { return orders_ > 0; }
  std::uint64_t orders() const { return orders_; }
  const Permutation& order() const { return order_; }
  std::uint64_t IdOf(const Entry& entry) const { return order_.IdOf(entry.hash); }

  // Returns the largest location that Put can give an id that is there without changing other entries.
  Location most_location() const { return most_location_; }

  std::size_t size() const { return count_; }
  std::size_t bytes() const { return memory_.bytes(); }

  // Apply the permutation that every index begins with, and its inverse.
  static std::uint64_t Permute(std::uint64_t id);
  static std::uint64_t Unpermute(std::uint64_t h);

 private:
  using Position = std::int64_t;  // of an entry in the array

  // How entries are stored: the lower bits of h, then the location plus one; all zero is empty.
  struct Layout {
    std::size_t min_rows;  // from this number on the layout serves
    unsigned entry_bytes, location_bytes;
    double max_load;     // growth begins there
    std::size_t growth;  // by 1 / growth of the capacity

    Location MostLocation() const { return (Location{1} << 8 * location_bytes) - 3; }
  };
  static const Layout kLayouts[2][3];  // for locations of 32 bits, and for longer locations

  // Where the bits of an entry are.
  struct Format {
    std::uint64_t stored_mask = 0;  // of h
    unsigned compare_shift = 0, location_shift = 0, rest_shift = 0;

    explicit Format(const Layout& layout);
  };

  static const Permutation kCommon;

  static constexpr int kStripeShift = 30;  // List takes 2^18 stripes of h one after the other
  static constexpr std::uint64_t kWithinStripe = (std::uint64_t{1} << kStripeShift) - 1;

  std::byte* At(Position p) const { return base_ + p * entry_bytes_; }
  // Returns the last 8 bytes of an entry: they end with the location, behind the upper stored bits of h.
  std::uint64_t LastWordAt(Position p) const {
    std::uint64_t word;
    std::memcpy(&word, At(p) + entry_bytes_ - 8, sizeof word);
    return word;
  }
  const Format& FormatAt(Position p) const { return p <= old_end_ ? old_format_ : format_; }
  bool IsEmpty(Position p) const { return LastWordAt(p) >> (64 - kLocationBits) == 0; }
  std::uint64_t StoredAt(Position p) const;
  std::uint64_t HashAt(Position p) const;
  std::int64_t Compare(Position p, std::uint64_t h, const Format& format) const;
  Location LocationAt(Position p) const { return (LastWordAt(p) >> FormatAt(p).location_shift) - 1; }
  static void Store(std::byte* entry, Position entry_bytes, std::uint64_t h, Location stored,
                    const Format& format) {
    const std::uint64_t last = (h & format.stored_mask) >> format.rest_shift | stored
                                                                                   << format.location_shift;
    std::memcpy(entry, &h, sizeof h);
    std::memcpy(entry + entry_bytes - 8, &last, sizeof last);
  }
  void Set(Position p, std::uint64_t h, Location location) {
    Store(At(p), entry_bytes_, h, location + 1, h >= bound_ ? format_ : old_format_);
  }

  static constexpr std::size_t kFew = 1 << 13;
  void ListFew(std::vector<std::uint64_t>& ids, std::vector<Location>* locations) const;
  static std::uint64_t SwapStripe(std::uint64_t h);
  Position ScaledHome(std::uint64_t h) const;
  Position Home(std::uint64_t h) const;
  Position Seek(std::uint64_t h) const;
  Position SeekFrom(Position p, std::uint64_t h, Position end, const Format& format) const;
  bool Holds(Position p, std::uint64_t h) const;
  Position Insert(std::uint64_t h, Location location, Position place);
  Location PutOrdered(std::uint64_t id, Location location, bool& crowds);
  void TakeOwnOrder();
  bool StayInReach(std::uint64_t h, Position place, Position empty) const;

  const Layout& LayoutFor(std::size_t rows) const;
  void SetLayout(const Layout& layout, std::size_t capacity);
  static Position ReachOf(const Format& format, std::size_t capacity);
  void Map(std::size_t slack, std::size_t capacity);
  bool MakeRoom();
  void BeginGrowth(const Layout& layout);
  void MoveSome(std::size_t positions);
  bool MoveBlock(Position stop);
  void TightenBound();
  void WidenSlack();
  void GiveUpReach(std::size_t entries);
  void Widen(Location location, std::size_t entries);
  TableIndex EmptyFor(std::size_t entries) const;
  void Rewrite(std::size_t entries);

  IndexMemory memory_;
  std::byte* base_ = nullptr;
  std::size_t slack_ = 0;     // positions left of the first home
  std::size_t capacity_ = 0;  // homes of entries with h ≥ bound_
  std::size_t count_ = 0;
  std::size_t max_count_ = 0;  // growth begins there
  bool crowded_ = false;       // there are ids that need all bits
  bool wide_ = false;          // there are locations of more than 32 bits
  Permutation order_;
  std::uint64_t orders_ = 0;  // former orders of the index

  const Layout* layout_ = nullptr;
  Position entry_bytes_ = 0;
  Format format_;
  Location most_location_ = 0;  // the largest location that all entries can hold
  Position reach_ = 0;          // how far left of its home an entry may lie
  std::uint64_t step_ = 0;      // between the h of two homes, times 2^16

  // While growing; otherwise old_end_ is -1 and bound_ 0.
  Format old_format_;
  Position old_reach_ = 0;
  std::size_t old_capacity_ = 0;
  std::uint64_t old_step_ = 0;
  std::uint64_t bound_ = 0;
  Position old_end_ = -1;
  Position new_begin_ = 0;  // of the leftmost entry that has moved
  std::size_t debt_ = 0;    // positions that should have been moved by now
};

}  // namespace tierstore
