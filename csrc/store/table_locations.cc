#include "store/table_locations.h"

#include <algorithm>
#include <new>

namespace tierstore {
namespace {

constexpr std::size_t kPrefetch = 16;
constexpr std::size_t kIdsAtOnce = 1024;
constexpr std::size_t kPositionsAtOnce = 1 << 16;
// A hash index of at least this many rows has parts that are longer than any search (kLongestRun of
// store/index.cc).
constexpr std::size_t kLeastParted = TableLocations::kParts << 14;
constexpr unsigned kSampledRangeBits = 10;  // ids of a full range that are counted: 2^this, or all

}  // namespace

void TableLocations::Find(const std::uint64_t* ids, std::size_t n, Location* locations) const {
  if (ranges_.ranges() == 0) return hash_.Find(ids, n, locations);
  if (n == 1) {
    locations[0] = Find(ids[0]);  // there is nothing else to wait for meanwhile
    return;
  }
  for (std::size_t i = 0; i < std::min(n, kPrefetch); ++i) Prefetch(ids[i]);
  for (std::size_t i = 0; i < n; ++i) {
    if (i + kPrefetch < n) Prefetch(ids[i + kPrefetch]);
    locations[i] = Find(ids[i]);
  }
}

Location TableLocations::Find(std::uint64_t id) const {
  Location location;
  if (ranges_.Find(id, location)) return location;
  location = hash_.Find(id);
  return location == TableIndex::kAbsent && IsShrinking() ? former_->Find(id) : location;
}

void TableLocations::Put(const std::uint64_t* ids, const Location* locations, std::size_t n,
                         Location* previous) {
  if (ranges_.ranges() == 0) {
    hash_.Put(ids, locations, n, previous);
    for (std::size_t i = 0; i < n && MayBeDense(); ++i) {
      if (previous[i] == TableIndex::kAbsent) NoteNew(ids[i]);
    }
  } else {
    for (std::size_t i = 0; i < n; ++i) {
      if (i + kPrefetch < n) Prefetch(ids[i + kPrefetch]);
      previous[i] = PutOne(ids[i], locations[i]);
    }
  }
  Tidy();
}

Location TableLocations::Put(std::uint64_t id, Location location) {
  const Location previous = PutOne(id, location);
  Tidy();
  return previous;
}

Location TableLocations::PutOne(std::uint64_t id, Location location) {
  Location previous;
  if (ranges_.Put(id, location, previous)) return previous;
  previous = hash_.Put(id, location);
  if (previous == TableIndex::kAbsent && IsShrinking()) previous = former_->Erase(id);
  if (previous == TableIndex::kAbsent && MayBeDense()) NoteNew(id);
  return previous;
}

void TableLocations::NoteNew(std::uint64_t id) {
  if (const std::uint64_t hash = TableIndex::Permute(id); IsSampled(hash)) NoteSampled(hash);
}

// Of two neighbouring parts of the hash index, one is in the lower half of parts.
std::size_t TableLocations::PartOf(std::uint64_t id) const {
  if (ranges_.Has(id)) return ranges_.NumberOf(id) % kParts;
  const std::size_t part = TableIndex::Permute(id) * kParts >> 48;
  return part % 2 * (kParts / 2) + part / 2;
}

void TableLocations::Prefetch(std::uint64_t id) const {
  ranges_.Prefetch(id);
  if (hash_.size() > 0) hash_.Prefetch(id);
  if (IsShrinking()) former_->Prefetch(id);
}

bool TableLocations::MayReplace(std::uint64_t id, Location location) const {
  if (ranges_.Has(id)) return true;
  return !IsShrinking() && hash_.size() >= kLeastParted && !hash_.HasOwnOrder() &&
         location <= hash_.most_location();
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

// Makes a step of the work that goes on in the background of calls. Where memory is short, the next call
// tries again.
void TableLocations::Tidy() try {
  ranges_.WidenAhead();
  if (IsShrinking()) {
    GoOnShrinking();
  } else if (!due_.empty() && !held_ && size() >= form_.dense_from) {
    MakeRangeDense();
  }
} catch (const std::bad_alloc&) {
}

// Makes a range dense that is due, unless the hash index has yet to grow.
void TableLocations::MakeRangeDense() {
  hash_.GoOnGrowing(kPositionsAtOnce);
  if (hash_.IsGrowing()) return;
  const std::uint64_t number = due_.back();
  if (MakeDense(number)) {
    samples_.erase(number);
  } else {
    // Somebody chose the ids that are counted. The range is due when as many of these ids came once more.
    samples_[number] = 0;
  }
  due_.pop_back();
  if (!hash_.IsSparse() || (!due_.empty() && ranges_.ranges() % 64 != 0)) return;
  former_ = std::make_unique<TableIndex>(hash_.Smaller());
  std::swap(*former_, hash_);
  former_end_ = former_->DumpBegin();
}

// Entries move in descending order, so the smaller index is filled without pushing entries aside.
void TableLocations::GoOnShrinking(std::size_t entries) {
  TableIndex::Entry entry;
  for (std::size_t i = 0; i < entries && former_->First(former_end_, entry); ++i) {
    const std::uint64_t id = former_->IdOf(entry);
    hash_.Put(id, entry.location);
    former_->Erase(id);
  }
  if (former_->size() == 0) former_.reset();
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

// Ranges come first, and new ranges as soon as there are any. Of new ranges the list leaves out the ids that
// the hash index listed before they left the hash index. When the hash index gets another order, its list
// begins anew, without the ids that were listed by former orders.
bool TableLocations::List(Listing& listing, std::size_t limit, std::vector<std::uint64_t>& ids,
                          std::vector<Location>* locations) {
  if (IsShrinking()) {
    GoOnShrinking();
    return true;
  }
  std::vector<Listing::Order>& orders = listing.orders_;
  if (orders.empty() || orders.back().number != hash_.orders())
    orders.push_back({hash_.order(), hash_.orders(), 0});
  Listing::Order& order = orders.back();
  while (limit > 0) {
    const std::size_t first = ids.size();
    const bool in_ranges = listing.range_at_ >> form_.range_bits < ranges_.ranges();
    if (in_ranges) {
      const std::uint64_t next = ranges_.List(listing.range_at_, limit, ids, locations);
      listing.range_at_ = next == TableIndex::kEnd ? ranges_.ranges() << form_.range_bits : next;
    } else if (order.at == TableIndex::kEnd) {
      return false;
    } else {
      order.at = hash_.List(order.at, limit, ids, locations);
    }
    limit -= ids.size() - first;
    DropListed(std::span(orders).first(orders.size() - (in_ranges ? 0 : 1)), first, ids, locations);
  }
  return true;
}

// Drops ids that were listed already, of the ids from `first` on.
void TableLocations::DropListed(std::span<const Listing::Order> orders, std::size_t first,
                                std::vector<std::uint64_t>& ids, std::vector<Location>* locations) {
  if (std::all_of(orders.begin(), orders.end(), [](const auto& order) { return order.at == 0; })) return;
  std::size_t kept = first;
  for (std::size_t i = first; i < ids.size(); ++i) {
    if (std::any_of(orders.begin(), orders.end(), [&](const auto& order) { return order.Has(ids[i]); }))
      continue;
    ids[kept] = ids[i];
    if (locations != nullptr) (*locations)[kept] = (*locations)[i];
    ++kept;
  }
  ids.resize(kept);
  if (locations != nullptr) locations->resize(kept);
}

void TableLocations::Reserve(std::size_t rows) {
  if (rows < form_.dense_from) hash_.Reserve(rows);
}

}  // namespace tierstore
