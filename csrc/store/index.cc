#include "store/index.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <random>
#include <utility>

#include "store/index_scale.h"

namespace tierstore {
namespace {

constexpr std::uint64_t kMul1 = 0xd9e4a5c3b12fULL, kMul2 = 0x9c3f27e1ad5bULL;

// Returns the inverse of an odd number modulo 2^48, by Newton's iteration.
constexpr std::uint64_t Inverse(std::uint64_t odd) {
  std::uint64_t x = odd;
  for (int i = 0; i < 6; ++i) x *= 2 - odd * x;
  return x & kMask48;
}

constexpr std::size_t kInitialCapacity = 128;
constexpr std::size_t kMovesPerInsert = 128;  // positions; growth ends after capacity/128 insertions
constexpr std::size_t kMovesAtOnce = 4096;
constexpr std::size_t kPrefetch = 16;
constexpr std::size_t kCacheLine = 64;
// A run goes from the home of an entry to the next empty position. At a load of 0.9 the share of longer runs
// is about exp(-0.0054 · kLongestRun) of all positions, so ids that nobody chose do not meet such a run.
constexpr std::int64_t kLongestRun = 1 << 13;

}  // namespace

const TableIndex::Permutation TableIndex::kCommon = {0, {kMul1, kMul2}, {Inverse(kMul1), Inverse(kMul2)}};

TableIndex::Permutation TableIndex::Permutation::Random() {
  std::random_device random;
  const auto draw = [&] { return (std::uint64_t{random()} << 32 | random()) & kMask48; };
  const std::uint64_t first = draw() | 1, second = draw() | 1;
  return {draw(), {first, second}, {Inverse(first), Inverse(second)}};
}

inline std::uint64_t TableIndex::Permutation::Of(std::uint64_t id) const {
  id = (id ^ flip) & kMask48;
  id = ((id ^ (id >> 24)) * factors[0]) & kMask48;
  id = ((id ^ (id >> 24)) * factors[1]) & kMask48;
  return id ^ (id >> 24);
}

std::uint64_t TableIndex::Permutation::IdOf(std::uint64_t h) const {
  h ^= h >> 24;  // its own inverse, since 24 is half of 48
  h = (h * inverses[1]) & kMask48;
  h ^= h >> 24;
  h = (h * inverses[0]) & kMask48;
  return h ^ (h >> 24) ^ flip;
}

std::uint64_t TableIndex::Permute(std::uint64_t id) { return kCommon.Of(id); }
std::uint64_t TableIndex::Unpermute(std::uint64_t h) { return kCommon.IdOf(h); }

// From 2^26 rows on the upper 16 bits of h follow from the position, with room for a reach of some 500
// positions.
#ifdef TIERSTORE_SMALL_INDEX  // the same changes, reached with fewer rows
constexpr std::size_t kMany = 1 << 16, kMost = 1 << 17;
const TableIndex::Layout TableIndex::kLayouts[2][3] = {
    {{0, 10, 4, 0.9, 16}, {kMany, 10, 4, 0.885, 6}, {kMost, 10, 5, 0.885, 6}},
    {{0, 11, 5, 0.9, 16}, {kMany, 10, 5, 0.885, 6}, {kMost, 10, 5, 0.885, 6}}};
#else
constexpr std::size_t kMany = 1 << 16, kMost = 1 << 26;
const TableIndex::Layout TableIndex::kLayouts[2][3] = {
    {{0, 10, 4, 0.9, 16}, {kMany, 9, 4, 0.885, 6}, {kMost, 9, 5, 0.885, 6}},
    {{0, 11, 5, 0.9, 16}, {kMany, 10, 5, 0.885, 6}, {kMost, 9, 5, 0.885, 6}}};
#endif

TableIndex::Format::Format(const Layout& layout) {
  const unsigned stored_bits = std::min(48u, (layout.entry_bytes - layout.location_bytes) * 8);
  stored_mask = (std::uint64_t{1} << stored_bits) - 1;
  compare_shift = stored_bits == 48 ? 0 : 64 - stored_bits;
  location_shift = 64 - 8 * layout.location_bytes;
  rest_shift = 8 * (layout.entry_bytes - 8);
}

TableIndex::TableIndex() : order_(kCommon), format_(kLayouts[0][0]), old_format_(format_) {
  SetLayout(kLayouts[0][0], kInitialCapacity);
}

inline std::uint64_t TableIndex::StoredAt(Position p) const {
  std::uint64_t word;
  std::memcpy(&word, At(p), sizeof word);
  return word & FormatAt(p).stored_mask;
}

// Returns the only h with the stored bits whose home is at p or up to reach_ positions to the right of p.
inline std::uint64_t TableIndex::HashAt(Position p) const {
  const std::uint64_t first = FirstHash(p - static_cast<Position>(slack_), p <= old_end_ ? old_step_ : step_);
  return first + ((StoredAt(p) - first) & FormatAt(p).stored_mask);
}

// Returns the sign of HashAt(p) - h, if the difference is less than half of what the stored bits can tell.
inline std::int64_t TableIndex::Compare(Position p, std::uint64_t h, const Format& format) const {
  std::uint64_t word;
  std::memcpy(&word, At(p), sizeof word);
  return static_cast<std::int64_t>(((word & format.stored_mask) - h) << format.compare_shift);
}

inline TableIndex::Position TableIndex::ScaledHome(std::uint64_t h) const {
  return static_cast<Position>(slack_ + Scale(h, h >= bound_ ? capacity_ : old_capacity_));
}

inline TableIndex::Position TableIndex::Home(std::uint64_t h) const {
  const Position home = ScaledHome(h);
  return h >= bound_ ? home : std::min(home, old_end_);
}

// Reverses the upper bits of h, which gives the order of List. The function is its own inverse.
std::uint64_t TableIndex::SwapStripe(std::uint64_t h) {
  std::uint64_t stripe = h >> kStripeShift, reversed = 0;
  for (int bit = kStripeShift; bit < 48; ++bit, stripe >>= 1) reversed = reversed << 1 | (stripe & 1);
  return reversed << kStripeShift | (h & kWithinStripe);
}

// Returns where h is or would have to be: at an empty position, or at a position with a smaller h. Position 0
// is always empty, so the search ends.
inline TableIndex::Position TableIndex::Seek(std::uint64_t h) const {
  Position p = Home(h);
  if (old_end_ < 0) [[likely]]
    return SeekFrom(p, h, -1, format_);
  p = SeekFrom(p, h, old_end_, format_);
  return p > old_end_ ? p : SeekFrom(p, h, -1, old_format_);
}

// Seeks from p on to the left, while p is right of `end`, through entries of one format.
inline TableIndex::Position TableIndex::SeekFrom(Position p, std::uint64_t h, Position end,
                                                 const Format& format) const {
  const std::uint64_t mask = format.stored_mask;
  const unsigned shift = format.compare_shift;
  const Position entry_bytes = entry_bytes_;
  for (const std::byte* at = At(p); p > end; --p, at -= entry_bytes) {
    std::uint64_t last, word;
    std::memcpy(&last, at + entry_bytes - 8, sizeof last);
    std::memcpy(&word, at, sizeof word);
    if (last >> (64 - kLocationBits) == 0 || static_cast<std::int64_t>(((word & mask) - h) << shift) <= 0)
      break;
  }
  return p;
}

inline bool TableIndex::Holds(Position p, std::uint64_t h) const {
  return !IsEmpty(p) && Compare(p, h, FormatAt(p)) == 0;
}

Location TableIndex::Find(std::uint64_t id) const {
  const std::uint64_t h = order_.Of(id);
  const Position p = Seek(h);
  const Format& format = FormatAt(p);
  return IsEmpty(p) || Compare(p, h, format) != 0 ? kAbsent : (LastWordAt(p) >> format.location_shift) - 1;
}

void TableIndex::Prefetch(std::uint64_t id) const { __builtin_prefetch(At(Home(order_.Of(id)))); }

void TableIndex::Find(const std::uint64_t* ids, std::size_t n, Location* locations) const {
  for (std::size_t i = 0; i < std::min(n, kPrefetch); ++i) __builtin_prefetch(At(Home(order_.Of(ids[i]))));
  for (std::size_t i = 0; i < n; ++i) {
    if (i + kPrefetch < n) __builtin_prefetch(At(Home(order_.Of(ids[i + kPrefetch]))));
    locations[i] = Find(ids[i]);
  }
}

void TableIndex::Put(const std::uint64_t* ids, const Location* locations, std::size_t n, Location* previous) {
  for (std::size_t i = 0; i < n; ++i) {
    if (i + kPrefetch < n) {
      // The way to the next empty position goes left, some 17 entries far.
      const std::byte* const end = At(Home(order_.Of(ids[i + kPrefetch])) + 1) - 1;
      for (std::size_t line = 0; line < 3; ++line) __builtin_prefetch(end - line * kCacheLine, 1);
    }
    previous[i] = Put(ids[i], locations[i]);
  }
}

Location TableIndex::Put(std::uint64_t id, Location location) {
  bool crowds = false;
  const Location previous = PutOrdered(id, location, crowds);
  if (crowds) TakeOwnOrder();
  return previous;
}

// Moves entries on the left that are away from their homes back by one position.
Location TableIndex::Erase(std::uint64_t id) {
  const std::uint64_t h = order_.Of(id);
  const Position p = Seek(h);
  if (!Holds(p, h)) return kAbsent;
  const Location location = LocationAt(p);
  Position hole = p;
  while (!IsEmpty(hole - 1) && ScaledHome(HashAt(hole - 1)) > hole - 1) --hole;
  std::memmove(At(hole + 1), At(hole), static_cast<std::size_t>((p - hole) * entry_bytes_));
  std::memset(At(hole), 0, static_cast<std::size_t>(entry_bytes_));
  --count_;
  return location;
}

// `crowds` becomes true when the entry ends a run that is too long.
Location TableIndex::PutOrdered(std::uint64_t id, Location location, bool& crowds) {
  if (location > most_location_) Widen(location, count_);
  const std::uint64_t h = order_.Of(id);
  Position p = Seek(h);
  if (Holds(p, h)) {
    const Location previous = LocationAt(p);
    Set(p, h, location);
    return previous;
  }
  if (MakeRoom()) p = Seek(h);
  const Position end = Insert(h, location, p);
  crowds = Home(h) - end > kLongestRun;
  ++count_;
  return kAbsent;
}

// Makes room before an insertion. Returns whether entries have moved.
bool TableIndex::MakeRoom() {
  if (old_end_ >= 0) {
    debt_ += kMovesPerInsert;
    if (debt_ < kMovesAtOnce) return false;
    MoveSome(std::exchange(debt_, 0));
    return true;
  }
  if (count_ < max_count_) return false;
  if (const Layout& layout = LayoutFor(count_); layout.entry_bytes != layout_->entry_bytes) {
    Rewrite(count_ + count_ / layout.growth);
  } else {
    BeginGrowth(layout);
  }
  return true;
}

// `place` is Seek(h), and h is not there. Moves the entries from there to the next empty position on the
// left, all of which are smaller, left by one position. Returns the position that was empty.
TableIndex::Position TableIndex::Insert(std::uint64_t h, Location location, Position place) {
  while (true) {
    Position empty = place;
    while (!IsEmpty(empty)) --empty;
    if (empty > 0 && StayInReach(h, place, empty)) {
      std::memmove(At(empty), At(empty + 1), static_cast<std::size_t>((place - empty) * entry_bytes_));
      Set(place, h, location);
      if (h < bound_) return empty;
      if (empty <= old_end_) {  // the new part takes a position from the old one
        --old_end_;
        TightenBound();
      }
      new_begin_ = std::min(new_begin_, std::max(empty, old_end_ + 1));
      return empty;
    }
    // Position 0 must stay empty.
    if (empty > 0) {
      GiveUpReach(count_ + 1);
    } else if (old_end_ < 0) {
      WidenSlack();
    } else {
      MoveSome(slack_ + capacity_);
    }
    place = Seek(h);
  }
}

// Returns whether all entries would be in reach of their homes if h came to `place`, and the entries from
// there to `empty` moved left.
bool TableIndex::StayInReach(std::uint64_t h, Position place, Position empty) const {
  if (ScaledHome(h) - empty <= reach_) return true;
  if (ScaledHome(h) - place > reach_) return false;
  for (Position p = empty + 1; p <= place; ++p) {
    if (ScaledHome(HashAt(p)) - (p - 1) > reach_) return false;
  }
  return true;
}

std::uint64_t TableIndex::List(std::uint64_t cursor, std::size_t limit, std::vector<std::uint64_t>& ids,
                               std::vector<Location>* locations) const {
  if (cursor == 0 && count_ <= std::min(limit, kFew)) {
    ListFew(ids, locations);
    return kEnd;
  }
  for (; cursor <= kMask48; cursor = (cursor | kWithinStripe) + 1) {
    const std::uint64_t first = SwapStripe(cursor), last = first | kWithinStripe;
    // Seen from home, no entry right of the first smaller entry is smaller.
    Position p = Home(first);
    while (!IsEmpty(p) && HashAt(p) >= first) --p;
    for (const Position end = Home(last); p <= end; ++p) {
      if (IsEmpty(p) || HashAt(p) < first) continue;
      if (HashAt(p) > last) break;
      if (limit-- == 0) return SwapStripe(HashAt(p));
      ids.push_back(order_.IdOf(HashAt(p)));
      if (locations != nullptr) locations->push_back(LocationAt(p));
    }
  }
  return kEnd;
}

std::uint64_t TableIndex::ListPlace(const Permutation& order, std::uint64_t id) {
  return SwapStripe(order.Of(id));
}

// Lists in the same order, without the way through stripes of which most are empty.
void TableIndex::ListFew(std::vector<std::uint64_t>& ids, std::vector<Location>* locations) const {
  std::vector<Entry> entries(count_);
  std::int64_t cursor = DumpBegin();
  Dump(cursor, entries.data(), entries.size());
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return SwapStripe(a.hash) < SwapStripe(b.hash); });
  for (const Entry& entry : entries) {
    ids.push_back(order_.IdOf(entry.hash));
    if (locations != nullptr) locations->push_back(entry.location);
  }
}

std::size_t TableIndex::Dump(std::int64_t& cursor, Entry* out, std::size_t limit) const {
  std::size_t n = 0;
  while (n < limit && cursor > 0) {
    --cursor;
    if (!IsEmpty(cursor)) out[n++] = {HashAt(cursor), LocationAt(cursor)};
  }
  return n;
}

// All entries with a smaller h lie to the left of the position where `bound` is or would have to be.
std::size_t TableIndex::DumpBelow(std::uint64_t& bound, Entry* out, std::size_t limit) const {
  Position cursor = bound == kNoBound ? DumpBegin() : Seek(bound) + (Holds(Seek(bound), bound) ? 0 : 1);
  const std::size_t n = Dump(cursor, out, limit);
  if (n > 0) bound = out[n - 1].hash;
  return n;
}

bool TableIndex::First(std::int64_t& end, Entry& out) const {
  while (end > 0 && IsEmpty(end - 1)) --end;
  if (end > 0) out = {HashAt(end - 1), LocationAt(end - 1)};
  return end > 0;
}

void TableIndex::Reserve(std::size_t entries, Location most) {
  if (count_ > 0) return;
  wide_ = wide_ || most > kLayouts[0][0].MostLocation();
  if (const Layout& layout = LayoutFor(entries); entries > max_count_ || &layout != layout_) {
    const double capacity = static_cast<double>(entries) / layout.max_load;
    SetLayout(layout, std::max(kInitialCapacity, static_cast<std::size_t>(capacity) + entries / 256 + 1));
  }
  new_begin_ = static_cast<Position>(slack_ + capacity_);
}

bool TableIndex::Append(const Entry* entries, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t h = entries[i].hash;
    if (h > kMask48 || entries[i].location > kMaxLocation) return false;
    if (count_ > 0 && HashAt(new_begin_) <= h) return false;
    if (entries[i].location > most_location_) Widen(entries[i].location, max_count_);
    const auto place = [&] { return std::min(Home(h), new_begin_ - 1); };
    if (ScaledHome(h) - place() > reach_) GiveUpReach(max_count_);
    while (place() <= 0) WidenSlack();
    const Position to = place();
    Set(to, h, entries[i].location);
    new_begin_ = to;
    ++count_;
  }
  return true;
}

// Places the entries where Append would put them, if no larger entries were spilled there. Home(h) of the
// last entry belongs to the next piece, whose entries may have the same home.
bool TableIndex::Place(const Entry* entries, std::size_t n, std::vector<Entry>& spilled) {
  const Position floor = n == 0 ? 0 : Home(entries[n - 1].hash & kMask48);
  Position next = static_cast<Position>(slack_ + capacity_);
  for (std::size_t i = 0; i < n; ++i) {
    const auto [h, location] = entries[i];
    if (h > kMask48 || location > most_location_ || (i > 0 && h >= entries[i - 1].hash)) return false;
    const Position home = Home(h), to = std::min(home, next - 1);
    if (home - to > reach_ || std::ssize(spilled) > kLongestRun) return false;
    next = to;
    if (to > floor) {
      Set(to, h, location);
    } else {
      spilled.push_back(entries[i]);
    }
  }
  return true;
}

void TableIndex::Settle(const std::vector<Entry>& spilled, std::size_t entries) {
  count_ = entries - spilled.size();
  for (const Entry& entry : spilled) {
    Insert(entry.hash, entry.location, Seek(entry.hash));
    ++count_;
  }
}

}  // namespace tierstore
