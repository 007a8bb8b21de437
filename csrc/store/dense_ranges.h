// Holds the locations of ids that lie close together: the array of a *range* of ids has a location at the
// position of each id. So no id is stored, and a lookup is exact and looks at one place.
//
// A range is an aligned power of two of ids. Locations take as many bits as the largest location of their
// range needs; when a longer location comes, the range is copied. WidenAhead copies most ranges before that,
// one at a time. Ranges of equally long locations share one mapping, in huge pages once it is large.
//
// Not thread-safe, but for Set and Fill. Memory is mapped, not allocated: bytes() is what the process holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/index.h"
#include "store/index_memory.h"

namespace tierstore {

class DenseRanges {
 public:
  // A range has 2^range_bits ids. With fewer than 2^6, ranges would share words.
  static constexpr unsigned kRangeBits = 16, kLeastRangeBits = 6;
  // An array has locations plus one, so that 0 says that an id is absent. All ones is no location either.
  static constexpr unsigned kMostBits = TableIndex::kLocationBits;

  explicit DenseRanges(unsigned range_bits) : range_bits_(range_bits) {}

  // Only the lower 48 bits of ids count, here and below.
  std::uint64_t NumberOf(std::uint64_t id) const {
    return (id & ((std::uint64_t{1} << 48) - 1)) >> range_bits_;
  }
  std::size_t ids_per_range() const { return std::size_t{1} << range_bits_; }

  // Makes a range that is not there, for locations up to `most`. Throws std::bad_alloc with nothing changed.
  void Add(std::uint64_t number, Location most);
  bool Has(std::uint64_t id) const;
  void Prefetch(std::uint64_t id) const;

  // Returns false when no range has the id. Otherwise `location` becomes the id's location, or kAbsent.
  bool Find(std::uint64_t id, Location& location) const;
  // Returns false when no range has the id. Otherwise gives the id a new location, and `previous` the former
  // one. Throws std::bad_alloc with nothing changed.
  bool Put(std::uint64_t id, Location location, Location& previous);
  // Copies one range that the locations to come will not fit. When they do come, a call that puts many rows
  // would otherwise copy a range for each.
  void WidenAhead();

  // Does what Put does, for a location that the range has room for (Fit), but neither gives the former
  // location nor counts ids that were absent. Different threads may set ids of different ranges.
  bool Set(std::uint64_t id, Location location);
  // Gives all ranges room for locations up to `most`. Throws std::bad_alloc.
  void Fit(Location most);

  // Sets locations, `kAbsent` for none, of all ids of a range that holds none yet. Different ranges may be
  // filled from different threads; no other call may be under way. Returns the number of locations, which the
  // caller passes to Count when all are filled. The locations must fit what the range was made for.
  std::size_t Fill(std::uint64_t number, const Location* locations);
  void Count(std::size_t filled) { count_ += filled; }

  // Appends up to `limit` ids with their locations from `cursor` (0 at first) on; returns the next cursor, or
  // TableIndex::kEnd. Ranges come in the order in which they were made.
  std::uint64_t List(std::uint64_t cursor, std::size_t limit, std::vector<std::uint64_t>& ids,
                     std::vector<Location>* locations) const;

  // The ranges as they are in memory, for snapshots: an array of `bits` for each id, which ArrayBytes holds.
  struct Array {
    std::uint64_t number;
    unsigned bits;
    const std::byte* data;
  };
  std::size_t ranges() const { return ranges_.size(); }
  Array ArrayOf(std::size_t rank) const {
    return {ranges_[rank].number, ranges_[rank].bits, ranges_[rank].data};
  }
  static std::size_t ArrayBytes(unsigned range_bits, unsigned bits) {
    return std::size_t{bits} << (range_bits - 3);
  }
  // Return the location at a position of an array, or kAbsent; set it.
  static Location At(const std::byte* array, unsigned range_bits, unsigned bits, std::size_t position);
  static void SetAt(std::byte* array, unsigned range_bits, unsigned bits, std::size_t position,
                    Location location);
  // Returns the value that At gives where all bits are set. No location in an array of `bits` has this value.
  static Location NoLocation(unsigned bits) { return (Location{1} << bits) - 2; }

  unsigned range_bits() const { return range_bits_; }
  std::size_t size() const { return count_; }
  std::size_t bytes() const;

 private:
  struct Range {
    std::byte* data;
    std::uint64_t number;
    std::uint32_t bits;
    std::uint32_t place;  // in the pool of these bits
  };
  // The ranges of equally long locations.
  struct Pool {
    IndexMemory memory;
    std::vector<std::uint32_t> free;  // places
    std::uint32_t places = 0;         // free places included
  };
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  static constexpr unsigned kLeastBits = 8;

  std::size_t BytesOf(unsigned bits) const { return ArrayBytes(range_bits_, bits); }
  std::uint32_t RankOf(std::uint64_t number) const;
  void Rehash();
  std::uint32_t TakePlace(unsigned bits);
  void GivePlace(const Range& range);
  void Widen(Range& range, unsigned bits);
  void Store(const Range& range, std::size_t position, Location location) {
    SetAt(range.data, range_bits_, range.bits, position, location);
  }
  std::size_t PositionOf(std::uint64_t id) const { return id & (ids_per_range() - 1); }

  unsigned range_bits_;
  std::vector<Range> ranges_;         // in the order in which they were made
  std::vector<std::uint32_t> ranks_;  // a hash table of positions in ranges_, plus one
  std::vector<Pool> pools_;           // by bits, once there is a range
  Location most_ = 0;                 // the largest location that was ever put
  unsigned ahead_bits_ = 0;           // the least bits of ranges up to ahead_rank_
  std::size_t ahead_rank_ = 0;
  std::size_t count_ = 0;
};

}  // namespace tierstore
