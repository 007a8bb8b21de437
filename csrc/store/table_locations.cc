#include "store/table_locations.h"

#include <algorithm>
#include <new>

namespace tierstore {
namespace {

constexpr std::size_t kPrefetch = 16;
constexpr std::size_t kIdsAtOnce = 1024;
constexpr std::size_t kPositionsAtOnce = 1 << 16;
// Rows of a hash index whose parts are longer than any search is (kLongestRun of store/index.cc).
constexpr std::size_t kLeastParted = TableLocations::kParts << 14;
constexpr unsigned kSampledRangeBits = 10;  // ids of a full range that are counted: 2^this, or all

}  // namespace

void TableLocations::Find(const std::uint64_t* ids, std::size_t n, Location* locations) const {
  if (ranges_.ranges() == 0) return hash_.Find(ids, n, locations);
  for (std::size_t i = 0; i < std::min(n, kPrefetch); ++i) Prefetch(ids[i]);
  for (std::size_t i = 0; i < n; ++i) {
    if (i + kPrefetch < n) Prefetch(ids[i + kPrefetch]);
    locations[i] = Find(ids[i]);
  }
}

Location TableLocations::Find(std::uint64_t id) const {
  Location location;
  return ranges_.Find(id, location) ? location : hash_.Find(id);
}

void TableLocations::Put(const std::uint64_t* ids, const Location* locations, std::size_t n,
                         Location* previous) {
  if (ranges_.ranges() == 0) {
    hash_.Put(ids, locations, n, previous);
    puts_ += n;
    for (std::size_t i = 0; i < n && MayBeDense(); ++i) {
      if (previous[i] == TableIndex::kAbsent) NoteNew(ids[i]);
    }
  } else {
    for (std::size_t i = 0; i < n; ++i) {
      if (i + kPrefetch < n) Prefetch(ids[i + kPrefetch]);
      previous[i] = PutOne(ids[i], locations[i]);
    }
  }
  MakeRangeDense();
}

Location TableLocations::Put(std::uint64_t id, Location location) {
  const Location previous = PutOne(id, location);
  MakeRangeDense();
  return previous;
}

Location TableLocations::PutOne(std::uint64_t id, Location location) {
  ++puts_;
  Location previous;
  if (ranges_.Put(id, location, previous)) return previous;
  previous = hash_.Put(id, location);
  if (previous == TableIndex::kAbsent && MayBeDense()) NoteNew(id);
  return previous;
}

void TableLocations::NoteNew(std::uint64_t id) {
  if (const std::uint64_t hash = TableIndex::Permute(id); IsSampled(hash)) NoteSampled(hash);
}

// Of two neighbours in the hash index one is in the lower half of parts.
std::size_t TableLocations::PartOf(std::uint64_t id) const {
  if (ranges_.Has(id)) return ranges_.NumberOf(id) % kParts;
  const std::size_t part = TableIndex::Permute(id) * kParts >> 48;
  return part % 2 * (kParts / 2) + part / 2;
}

void TableLocations::Prefetch(std::uint64_t id) const {
  ranges_.Prefetch(id);
  if (hash_.size() > 0) hash_.Prefetch(id);
}

bool TableLocations::MayReplace(std::uint64_t id, Location location) const {
  if (ranges_.Has(id)) return true;
  return hash_.size() >= kLeastParted && !hash_.HasOwnOrder() && location <= hash_.most_location();
}

void TableLocations::Replace(std::uint64_t id, Location location) {
  if (!ranges_.Set(id, location)) hash_.Put(id, location);
}

std::uint64_t TableLocations::SampleMask() const {
  return form_.range_bits <= kSampledRangeBits ? 0 : (1u << (form_.range_bits - kSampledRangeBits)) - 1;
}

std::uint32_t TableLocations::LeastSamples() const {
  const auto all = static_cast<double>(ranges_.ids_per_range() / (SampleMask() + 1));
  return static_cast<std::uint32_t>(kDenseShare * all);
}

void TableLocations::NoteSampled(std::uint64_t hash) {
  const std::uint64_t number = ranges_.NumberOf(TableIndex::Unpermute(hash));
  if (++samples_[number] == LeastSamples()) due_.push_back(number);
}

// One that is due, unless ids are being listed, or the hash index has yet to grow.
void TableLocations::MakeRangeDense() {
  if (due_.empty() || size() < form_.dense_from || puts_ < listed_until_) return;
  const std::uint64_t number = due_.back();
  try {
    hash_.GoOnGrowing(kPositionsAtOnce);
    if (hash_.IsGrowing()) return;
    if (MakeDense(number)) {
      samples_.erase(number);
    } else {
      samples_[number] = 0;  // ids that were chosen to be counted: it is due when as many came once more
    }
    due_.pop_back();
    if (due_.empty() || ranges_.ranges() % 64 == 0) hash_.Shrink();
  } catch (const std::bad_alloc&) {  // tried again by the next call
  }
}

bool TableLocations::MakeDense(std::uint64_t number) {
  const std::size_t ids_per_range = ranges_.ids_per_range();
  std::vector<Location> locations(ids_per_range);
  std::uint64_t ids[kIdsAtOnce];
  Location most = 0;
  std::size_t there = 0;
  for (std::size_t first = 0; first < ids_per_range; first += kIdsAtOnce) {
    const std::size_t n = std::min(ids_per_range - first, kIdsAtOnce);
    for (std::size_t i = 0; i < n; ++i) ids[i] = (number << form_.range_bits) + first + i;
    hash_.Find(ids, n, &locations[first]);
  }
  for (const Location location : locations) {
    if (location == TableIndex::kAbsent) continue;
    most = std::max(most, location);
    ++there;
  }
  if (static_cast<double>(there) < kDenseShare * static_cast<double>(ids_per_range) / 2) return false;
  ranges_.Add(number, most);
  ranges_.Count(ranges_.Fill(number, locations.data()));
  for (std::size_t i = 0; i < ids_per_range; ++i) {
    if (i + kPrefetch < ids_per_range) hash_.Prefetch((number << form_.range_bits) + i + kPrefetch);
    if (locations[i] != TableIndex::kAbsent) hash_.Erase((number << form_.range_bits) + i);
  }
  return true;
}

std::uint64_t TableLocations::List(std::uint64_t cursor, std::size_t limit, std::vector<std::uint64_t>& ids,
                                   std::vector<Location>* locations) {
  listed_until_ = puts_ + kPutsOfList;
  std::uint64_t at = cursor & ((std::uint64_t{1} << kGenerationShift) - 1);
  if ((cursor & kInRanges) == 0) {
    const std::size_t before = ids.size();
    const std::uint64_t next =
        hash_.List(cursor == 0 ? 0 : at | hash_.orders() << kGenerationShift, limit, ids, locations);
    if (next != TableIndex::kEnd) return CursorOf(next & ((std::uint64_t{1} << kGenerationShift) - 1));
    limit -= ids.size() - before;
    at = 0;
  }
  at = ranges_.List(at, limit, ids, locations);
  if (at != TableIndex::kEnd) return CursorOf(at) | kInRanges;
  listed_until_ = 0;
  return TableIndex::kEnd;
}

void TableLocations::Reserve(std::size_t rows) {
  if (rows < form_.dense_from) hash_.Reserve(rows);
}

}  // namespace tierstore
