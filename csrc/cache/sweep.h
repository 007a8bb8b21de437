// Orders the rows that are to be read for coming lookups by their places in a store.
//
// A reader goes round all places again and again, always in the same order. Each time the reader comes to a
// place, the reader takes the rows there that a lookup within its horizon asks for. Rows of many lookups that
// lie near one another thus come together, however few of these rows each lookup asks for. A lift serves the
// floors of a house in the same way (the elevator algorithm of disk scheduling: Knuth, The Art of Computer
// Programming 1, 2.2.5). But 64 stretches of the places of a large store come in the order of their numbers'
// reversed bits. Few of the rows that were written long ago are used soon, and many of the new rows. So any
// part of a round that is longer than some stretches has places of every age, and costs as much, and takes as
// much room, as any other part.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "common/page_allocator.h"

namespace tierstore {

class Sweep {
 public:
  // The place of a row that is not stored.
  static constexpr std::uint64_t kNowhere = ~std::uint64_t{0};
  // The bytes that an entry costs.
  static constexpr double kBytesPerEntry = 12;

  Sweep();

  // Adds an entry for each key that has a place: lookup seqs[i] asks for keys[i], which is at places[i].
  void Add(const std::uint64_t* keys, const std::uint64_t* places, const std::int64_t* seqs, std::int64_t n);

  // Goes on from the current place, for at most `way` of a round, and appends up to `limit` keys that lookups
  // from `first` to `last` ask for. A key may come again. Later lookups' entries stay; earlier lookups'
  // entries go. Returns the earliest of the lookups that the keys are for; `last` + 1 if there is no key.
  std::int64_t Next(double way, std::int64_t limit, std::int64_t first, std::int64_t last,
                    PageVector<std::uint64_t>* keys);

  std::int64_t size() const { return size_; }
  // Returns the rounds that are complete, and the part that is done of the round that has begun.
  double rounds() const { return rounds_ + static_cast<double>(at_) / static_cast<double>(Visits()); }

 private:
  // Lookups are numbered modulo 2^32; fewer than 2^31 of them are known at once.
  struct Entry {
    std::uint32_t key_low, key_high;
    std::uint32_t seq;

    std::uint64_t key() const { return std::uint64_t{key_high} << 32 | key_low; }
    // Returns by how many lookups the entry's lookup comes after `first`; negative when it comes before.
    std::int32_t After(std::int64_t first) const {
      return static_cast<std::int32_t>(seq - static_cast<std::uint32_t>(first));
    }
  };
  static_assert(sizeof(Entry) == kBytesPerEntry);
  using Bucket = std::vector<Entry>;
  static constexpr std::size_t kBuckets = 4096;
  static constexpr std::size_t kStretch = 64;  // buckets

  // Returns how many buckets are visited in a round.
  std::size_t Visits() const { return shift_ == 0 ? used_ : kBuckets; }
  // Returns the bucket that is visited as the n-th of a round.
  std::size_t BucketAt(std::size_t n) const;
  void MakeWider(std::uint64_t place);

  // Bucket b has the places from b << shift_ on; the buckets from used_ on are empty.
  std::vector<Bucket> buckets_;
  int shift_ = 0;
  std::size_t used_ = 1;
  std::size_t at_ = 0;    // how many buckets of this round were visited, empty ones included
  std::size_t done_ = 0;  // entries of that bucket that were visited in this round
  double rounds_ = 0;
  std::int64_t size_ = 0;
};

}  // namespace tierstore
