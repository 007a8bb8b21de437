#include "store/dense_ranges.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "common/huge_pages.h"
#include "common/key.h"

namespace tierstore {
namespace {

// The word that holds a position of an array; the word lies within the array.
struct Word {
  std::size_t byte;
  unsigned shift;
};

Word WordOf(std::size_t array_bytes, unsigned bits, std::size_t position) {
  const std::size_t bit = position * bits, byte = std::min(bit / 8, array_bytes - 8);
  return {byte, static_cast<unsigned>(bit - byte * 8)};
}

constexpr std::uint64_t Mask(unsigned bits) { return (std::uint64_t{1} << bits) - 1; }

unsigned BitsFor(Location most) { return static_cast<unsigned>(std::bit_width(most + 2)); }

// Ranges get another bit ahead when so many eighths of the locations that their bits can tell are used.
constexpr Location kEighthsUsed = 7;
constexpr std::size_t kRanksAtOnce = 64;  // that WidenAhead looks at

unsigned BitsAhead(Location most) {
  const unsigned bits = BitsFor(most);
  return most / kEighthsUsed < (Mask(bits) + 1) / 8 ? bits : std::min(bits + 1, DenseRanges::kMostBits);
}

// Returns the bytes to make accessible for so many, where a huge page of which more than half is needed is
// better whole: the system gives one only where all of it is accessible when its first byte is written.
std::size_t Accessible(std::size_t bytes) {
  const std::size_t rest = bytes % kHugePageBytes;
  return rest > kHugePageBytes / 2 ? bytes - rest + kHugePageBytes : bytes;
}

}  // namespace

Location DenseRanges::At(const std::byte* array, unsigned range_bits, unsigned bits, std::size_t position) {
  const auto [byte, shift] = WordOf(ArrayBytes(range_bits, bits), bits, position);
  std::uint64_t word;
  std::memcpy(&word, array + byte, sizeof word);
  return (word >> shift & Mask(bits)) - 1;
}

void DenseRanges::SetAt(std::byte* array, unsigned range_bits, unsigned bits, std::size_t position,
                        Location location) {
  const auto [byte, shift] = WordOf(ArrayBytes(range_bits, bits), bits, position);
  std::uint64_t word;
  std::memcpy(&word, array + byte, sizeof word);
  word = (word & ~(Mask(bits) << shift)) | (location + 1) << shift;
  std::memcpy(array + byte, &word, sizeof word);
}

inline std::uint32_t DenseRanges::RankOf(std::uint64_t number) const {
  if (ranks_.empty()) return kNone;
  const std::size_t mask = ranks_.size() - 1;
  for (std::size_t at = HashKey(number) & mask;; at = (at + 1) & mask) {
    const std::uint32_t rank = ranks_[at] - 1;
    if (rank == kNone || ranges_[rank].number == number) return rank;
  }
}

bool DenseRanges::Has(std::uint64_t id) const { return RankOf(NumberOf(id)) != kNone; }

void DenseRanges::Rehash() {
  std::vector<std::uint32_t> ranks(std::max<std::size_t>(16, 2 * ranks_.size()));
  for (std::uint32_t rank = 0; rank < ranges_.size(); ++rank) {
    std::size_t at = HashKey(ranges_[rank].number) & (ranks.size() - 1);
    while (ranks[at] != 0) at = (at + 1) & (ranks.size() - 1);
    ranks[at] = rank + 1;
  }
  ranks_.swap(ranks);
}

void DenseRanges::Add(std::uint64_t number, Location most) {
  most_ = std::max(most_, most);
  if (pools_.empty()) pools_.resize(kMostBits + 1);
  while (2 * (ranges_.size() + 1) > ranks_.size()) Rehash();
  if (ranges_.size() == ranges_.capacity()) ranges_.reserve(2 * ranges_.size() + 1);
  const unsigned bits = std::max(kLeastBits, BitsAhead(most_));
  const std::uint32_t place = TakePlace(bits);
  std::size_t at = HashKey(number) & (ranks_.size() - 1);
  while (ranks_[at] != 0) at = (at + 1) & (ranks_.size() - 1);
  ranges_.push_back({pools_[bits].memory.data() + place * BytesOf(bits), number, bits, place});
  ranks_[at] = static_cast<std::uint32_t>(ranges_.size());
}

// Takes a place for an array of zeros. The mapping may move, and with it the ranges that lie there.
std::uint32_t DenseRanges::TakePlace(unsigned bits) {
  Pool& pool = pools_[bits];
  if (!pool.free.empty()) {
    const std::uint32_t place = pool.free.back();
    pool.free.pop_back();
    return place;
  }
  const std::byte* const before = pool.memory.data();
  pool.memory.Extend(Accessible((pool.places + std::size_t{1}) * BytesOf(bits)));
  if (pool.memory.data() != before) {
    for (Range& range : ranges_) {
      if (range.bits == bits) range.data = pool.memory.data() + range.place * BytesOf(bits);
    }
  }
  return pool.places++;
}

void DenseRanges::GivePlace(const Range& range) {
  Pool& pool = pools_[range.bits];
  pool.free.push_back(range.place);
  if (pool.free.size() == pool.places) {
    pool = Pool();
  } else {
    pool.memory.Clear(range.place * BytesOf(range.bits), BytesOf(range.bits));
  }
}

void DenseRanges::Widen(Range& range, unsigned bits) {
  pools_[range.bits].free.reserve(pools_[range.bits].places);
  const std::uint32_t place = TakePlace(bits);
  const Range wide{pools_[bits].memory.data() + place * BytesOf(bits), range.number, bits, place};
  std::uint64_t word = 0;
  unsigned filled = 0;  // bits of the word
  std::byte* to = wide.data;
  for (std::size_t position = 0; position < ids_per_range(); ++position) {
    const std::uint64_t stored = At(range.data, range_bits_, range.bits, position) + 1;
    word |= stored << filled;
    filled += bits;
    if (filled < 64) continue;
    std::memcpy(to, &word, sizeof word);
    to += sizeof word;
    filled -= 64;
    word = filled == 0 ? 0 : stored >> (bits - filled);
  }
  GivePlace(range);
  range = wide;
}

void DenseRanges::WidenAhead() {
  if (ahead_rank_ == ranges_.size() && BitsAhead(most_) == ahead_bits_) return;
  if (const unsigned bits = BitsAhead(most_); bits != ahead_bits_) {
    ahead_bits_ = bits;
    ahead_rank_ = 0;
  }
  for (std::size_t i = 0; i < kRanksAtOnce && ahead_rank_ < ranges_.size(); ++i, ++ahead_rank_) {
    if (ranges_[ahead_rank_].bits >= ahead_bits_) continue;
    return Widen(ranges_[ahead_rank_], ahead_bits_);
  }
}

void DenseRanges::Prefetch(std::uint64_t id) const {
  const std::uint32_t rank = RankOf(NumberOf(id));
  if (rank == kNone) return;
  const Range& range = ranges_[rank];
  __builtin_prefetch(range.data + PositionOf(id) * range.bits / 8, 1);
}

bool DenseRanges::Find(std::uint64_t id, Location& location) const {
  const std::uint32_t rank = RankOf(NumberOf(id));
  if (rank == kNone) return false;
  location = At(ranges_[rank].data, range_bits_, ranges_[rank].bits, PositionOf(id));
  return true;
}

bool DenseRanges::Put(std::uint64_t id, Location location, Location& previous) {
  const std::uint32_t rank = RankOf(NumberOf(id));
  if (rank == kNone) return false;
  Range& range = ranges_[rank];
  most_ = std::max(most_, location);
  if (location + 1 >= Mask(range.bits)) Widen(range, BitsFor(most_));
  const std::size_t position = PositionOf(id);
  previous = At(range.data, range_bits_, range.bits, position);
  count_ += previous == TableIndex::kAbsent;
  Store(range, position, location);
  return true;
}

bool DenseRanges::Set(std::uint64_t id, Location location) {
  const std::uint32_t rank = RankOf(NumberOf(id));
  if (rank != kNone) Store(ranges_[rank], PositionOf(id), location);
  return rank != kNone;
}

void DenseRanges::Fit(Location most) {
  most_ = std::max(most_, most);
  for (Range& range : ranges_) {
    if (most + 1 >= Mask(range.bits)) Widen(range, BitsFor(most_));
  }
}

std::size_t DenseRanges::Fill(std::uint64_t number, const Location* locations) {
  const Range& range = ranges_[RankOf(number)];
  std::size_t filled = 0;
  for (std::size_t position = 0; position < ids_per_range(); ++position) {
    if (locations[position] == TableIndex::kAbsent) continue;
    Store(range, position, locations[position]);
    ++filled;
  }
  return filled;
}

std::uint64_t DenseRanges::List(std::uint64_t cursor, std::size_t limit, std::vector<std::uint64_t>& ids,
                                std::vector<Location>* locations) const {
  for (; cursor >> range_bits_ < ranges_.size(); ++cursor) {
    const Range& range = ranges_[cursor >> range_bits_];
    const std::size_t position = PositionOf(cursor);
    const Location location = At(range.data, range_bits_, range.bits, position);
    if (location == TableIndex::kAbsent) continue;
    if (limit-- == 0) return cursor;
    ids.push_back(range.number << range_bits_ | position);
    if (locations != nullptr) locations->push_back(location);
  }
  return TableIndex::kEnd;
}

std::size_t DenseRanges::bytes() const {
  std::size_t bytes = ranges_.capacity() * sizeof(Range) + ranks_.capacity() * sizeof(std::uint32_t);
  for (unsigned bits = 0; bits < pools_.size(); ++bits)
    bytes += pools_[bits].memory.bytes() - pools_[bits].free.size() * BytesOf(bits);
  return bytes;
}

}  // namespace tierstore
