#include "store/index.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace tierstore {
namespace {

constexpr std::uint64_t kMask48 = (std::uint64_t{1} << 48) - 1;
constexpr std::uint64_t kMul1 = 0xd9e4a5c3b12fULL, kMul2 = 0x9c3f27e1ad5bULL;

// Inverse of an odd number modulo 2^48, by Newton's iteration.
constexpr std::uint64_t Inverse(std::uint64_t odd) {
  std::uint64_t x = odd;
  for (int i = 0; i < 6; ++i) x *= 2 - odd * x;
  return x & kMask48;
}

constexpr std::size_t kInitialCapacity = 128;
constexpr std::size_t kSlack = 256;
constexpr std::size_t kSmall = 1 << 14;       // below this, growth is coarser
constexpr std::size_t kMovesPerInsert = 128;  // positions; growth ends after capacity/128 insertions
constexpr std::size_t kMovesAtOnce = 4096;
constexpr std::int64_t kBlock = 512;
constexpr std::size_t kPrefetch = 16;
constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kEntriesAtOnce = 4096;
constexpr std::int64_t kAnyReach = std::int64_t{1} << 48;

std::uint64_t Scale(std::uint64_t h, std::size_t capacity) {
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(h) * capacity) >> 48);
}

// 2^64 / capacity
std::uint64_t StepOf(std::size_t capacity) {
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(1) << 64) / capacity);
}

// Not larger than any h whose home is the given number of steps from the first one, but hardly smaller.
std::uint64_t FirstHash(std::int64_t steps, std::uint64_t step) {
  if (steps <= 0) return 0;
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(steps) * step) >> 16);
}

}  // namespace

std::uint64_t TableIndex::Permute(std::uint64_t id) {
  id &= kMask48;
  id = ((id ^ (id >> 24)) * kMul1) & kMask48;
  id = ((id ^ (id >> 24)) * kMul2) & kMask48;
  return id ^ (id >> 24);
}

std::uint64_t TableIndex::Unpermute(std::uint64_t h) {
  h ^= h >> 24;  // its own inverse, since 24 is half of 48
  h = (h * Inverse(kMul2)) & kMask48;
  h ^= h >> 24;
  h = (h * Inverse(kMul1)) & kMask48;
  return h ^ (h >> 24);
}

TableIndex::TableIndex() { SetLayout(kLayouts[0], kInitialCapacity); }

inline bool TableIndex::IsEmpty(Position p) const {
  std::uint32_t stored;
  std::memcpy(&stored, At(p) + entry_bytes_ - 4, sizeof stored);
  return stored == 0;
}

inline std::uint64_t TableIndex::StoredAt(Position p) const {
  std::uint64_t word;
  std::memcpy(&word, At(p), sizeof word);
  return word & stored_mask_;
}

// The one h with the stored bits whose home is at p or up to reach_ to the right of it.
inline std::uint64_t TableIndex::HashAt(Position p) const {
  const std::uint64_t first = FirstHash(p - static_cast<Position>(slack_), p <= old_end_ ? old_step_ : step_);
  return first + ((StoredAt(p) - first) & stored_mask_);
}

// The sign of HashAt(p) - h, where that is less than half of what the stored bits can tell.
inline std::int64_t TableIndex::Compare(Position p, std::uint64_t h) const {
  return static_cast<std::int64_t>((StoredAt(p) - h) << compare_shift_);
}

inline std::uint32_t TableIndex::LocationAt(Position p) const {
  std::uint32_t stored;
  std::memcpy(&stored, At(p) + entry_bytes_ - 4, sizeof stored);
  return stored - 1;
}

inline void TableIndex::Set(Position p, std::uint64_t h, std::uint32_t location) {
  const std::uint32_t stored = location + 1;
  std::memcpy(At(p), &h, sizeof h);  // its upper bits make way for the location
  std::memcpy(At(p) + entry_bytes_ - 4, &stored, sizeof stored);
}

inline TableIndex::Position TableIndex::ScaledHome(std::uint64_t h) const {
  return static_cast<Position>(slack_ + Scale(h, h >= bound_ ? capacity_ : old_capacity_));
}

inline TableIndex::Position TableIndex::Home(std::uint64_t h) const {
  const Position home = ScaledHome(h);
  return h >= bound_ ? home : std::min(home, old_end_);
}

// The upper bits of h reversed, which is its own inverse: the order of List.
std::uint64_t TableIndex::SwapStripe(std::uint64_t h) {
  std::uint64_t stripe = h >> kStripeShift, reversed = 0;
  for (int bit = kStripeShift; bit < 48; ++bit, stripe >>= 1) reversed = reversed << 1 | (stripe & 1);
  return reversed << kStripeShift | (h & kWithinStripe);
}

// Where h is, or where it would have to be: at an empty position, or one with a smaller h. Position 0 is
// always empty, so the search ends.
inline TableIndex::Position TableIndex::Seek(std::uint64_t h) const {
  Position p = Home(h);
  while (!IsEmpty(p) && Compare(p, h) > 0) --p;
  return p;
}

inline bool TableIndex::Holds(Position p, std::uint64_t h) const { return !IsEmpty(p) && Compare(p, h) == 0; }

std::uint32_t TableIndex::Find(std::uint64_t id) const {
  const std::uint64_t h = Permute(id);
  const Position p = Seek(h);
  return Holds(p, h) ? LocationAt(p) : kAbsent;
}

void TableIndex::Find(const std::uint64_t* ids, std::size_t n, std::uint32_t* locations) const {
  for (std::size_t i = 0; i < std::min(n, kPrefetch); ++i) __builtin_prefetch(At(Home(Permute(ids[i]))));
  for (std::size_t i = 0; i < n; ++i) {
    if (i + kPrefetch < n) __builtin_prefetch(At(Home(Permute(ids[i + kPrefetch]))));
    locations[i] = Find(ids[i]);
  }
}

void TableIndex::Put(const std::uint64_t* ids, const std::uint32_t* locations, std::size_t n,
                     std::uint32_t* previous) {
  for (std::size_t i = 0; i < n; ++i) {
    if (i + kPrefetch < n) {
      // The way to the next empty position goes left, some 17 entries far.
      const std::byte* const end = At(Home(Permute(ids[i + kPrefetch])) + 1) - 1;
      for (std::size_t line = 0; line < 3; ++line) __builtin_prefetch(end - line * kCacheLine, 1);
    }
    previous[i] = Put(ids[i], locations[i]);
  }
}

std::uint32_t TableIndex::Put(std::uint64_t id, std::uint32_t location) {
  const std::uint64_t h = Permute(id);
  Position p = Seek(h);
  if (Holds(p, h)) {
    const std::uint32_t previous = LocationAt(p);
    Set(p, h, location);
    return previous;
  }
  if (MakeRoom()) p = Seek(h);
  Insert(h, location, p);
  ++count_;
  return kAbsent;
}

// `place` is Seek(h), where h is not. Entries from there to the next empty position on the left, all smaller,
// move left by one.
void TableIndex::Insert(std::uint64_t h, std::uint32_t location, Position place) {
  while (true) {
    Position empty = place;
    while (!IsEmpty(empty)) --empty;
    if (empty > 0 && StayInReach(h, place, empty)) {
      std::memmove(At(empty), At(empty + 1), static_cast<std::size_t>((place - empty) * entry_bytes_));
      Set(place, h, location);
      if (h < bound_) return;
      if (empty <= old_end_) {  // the new part takes a position from the old one
        --old_end_;
        TightenBound();
      }
      new_begin_ = std::min(new_begin_, std::max(empty, old_end_ + 1));
      return;
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

// Whether all entries would be in reach of their homes if h came to `place`, and the others up to `empty` to
// the left.
bool TableIndex::StayInReach(std::uint64_t h, Position place, Position empty) const {
  if (ScaledHome(h) - empty <= reach_) return true;
  if (ScaledHome(h) - place > reach_) return false;
  for (Position p = empty + 1; p <= place; ++p) {
    if (ScaledHome(HashAt(p)) - (p - 1) > reach_) return false;
  }
  return true;
}

std::uint64_t TableIndex::List(std::uint64_t cursor, std::size_t limit, std::vector<std::uint64_t>& ids,
                               std::vector<std::uint32_t>* locations) const {
  if (cursor == 0 && count_ <= std::min(limit, kFew)) {
    ListFew(ids, locations);
    return kEnd;
  }
  for (; cursor <= kMask48; cursor = (cursor | kWithinStripe) + 1) {
    const std::uint64_t first = SwapStripe(cursor), last = first | kWithinStripe;
    // All entries right of the first smaller one, seen from home, are not smaller.
    Position p = Home(first);
    while (!IsEmpty(p) && HashAt(p) >= first) --p;
    for (const Position end = Home(last); p <= end; ++p) {
      if (IsEmpty(p) || HashAt(p) < first) continue;
      if (HashAt(p) > last) break;
      if (limit-- == 0) return SwapStripe(HashAt(p));
      ids.push_back(Unpermute(HashAt(p)));
      if (locations != nullptr) locations->push_back(LocationAt(p));
    }
  }
  return kEnd;
}

// In the same order, without the way through stripes of which most are empty.
void TableIndex::ListFew(std::vector<std::uint64_t>& ids, std::vector<std::uint32_t>* locations) const {
  std::vector<Entry> entries(count_);
  std::int64_t cursor = DumpBegin();
  Dump(cursor, entries.data(), entries.size());
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return SwapStripe(a.hash) < SwapStripe(b.hash); });
  for (const Entry& entry : entries) {
    ids.push_back(Unpermute(entry.hash));
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

void TableIndex::Reserve(std::size_t entries) {
  if (count_ > 0) return;
  if (entries > max_count_) {
    const Layout& layout = LayoutFor(entries);
    const double capacity = static_cast<double>(entries) / layout.max_load;
    SetLayout(layout, static_cast<std::size_t>(capacity) + entries / 256 + 1);
  }
  new_begin_ = static_cast<Position>(slack_ + capacity_);
}

bool TableIndex::Append(const Entry* entries, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t h = entries[i].hash;
    if (h > kMask48 || entries[i].location > kMaxLocation) return false;
    if (count_ > 0 && HashAt(new_begin_) <= h) return false;
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

const TableIndex::Layout& TableIndex::LayoutFor(std::size_t rows) const {
  const Layout* layout = &kLayouts[0];
  for (const Layout& other : kLayouts) {
    if (rows >= other.least_rows && !crowded_) layout = &other;
  }
  return *layout;
}

// Of an index without entries.
void TableIndex::SetLayout(const Layout& layout, std::size_t capacity) {
  layout_ = &layout;
  entry_bytes_ = layout.entry_bytes;
  const unsigned stored_bits = std::min(48u, (layout.entry_bytes - 4) * 8);
  stored_mask_ = (std::uint64_t{1} << stored_bits) - 1;
  compare_shift_ = stored_bits == 48 ? 0 : 64 - stored_bits;
  Map(kSlack, capacity);
  SetReach();
}

void TableIndex::Map(std::size_t slack, std::size_t capacity) {
  memory_.Extend((slack + capacity) * static_cast<std::size_t>(entry_bytes_));
  base_ = memory_.data();
  slack_ = slack;
  capacity_ = capacity;
  step_ = StepOf(capacity);
  max_count_ = static_cast<std::size_t>(static_cast<double>(capacity) * layout_->max_load);
}

// Entries at p have homes from p to p + reach_, so what Compare meets differs by little more than that; it
// must be less than half of what the stored bits can tell.
void TableIndex::SetReach() {
  constexpr Position kMargin = 4;
  const Position half = static_cast<Position>(Scale((stored_mask_ + 1) / 2, capacity_));
  reach_ = compare_shift_ == 0 ? kAnyReach : half - kMargin;
}

// Before an insertion; whether entries have moved.
bool TableIndex::MakeRoom() {
  if (old_end_ >= 0) {
    debt_ += kMovesPerInsert;
    if (debt_ < kMovesAtOnce) return false;
    MoveSome(std::exchange(debt_, 0));
    return true;
  }
  if (count_ < max_count_) return false;
  if (const Layout& layout = LayoutFor(count_); &layout != layout_) {
    Rewrite(count_ + count_ / layout.growth);
  } else {
    BeginGrowth();
  }
  return true;
}

void TableIndex::BeginGrowth() {
  const std::size_t old = capacity_;
  const std::uint64_t step = step_;
  Map(slack_, old + old / (old < kSmall ? 2 : layout_->growth));
  old_capacity_ = old;
  old_step_ = step;
  bound_ = kMask48 + 1;
  old_end_ = static_cast<Position>(slack_ + old) - 1;
  new_begin_ = static_cast<Position>(slack_ + capacity_);
  debt_ = 0;
}

// Entries from the right end of the old part on move to their home by the new capacity or, where that is
// taken, to the left of what has moved.
void TableIndex::MoveSome(std::size_t positions) {
  const Position stop = std::max<Position>(old_end_ - static_cast<Position>(positions), -1);
  bool in_reach = true;
  while (in_reach && old_end_ > stop) in_reach = MoveBlock(std::max(stop, old_end_ - kBlock));
  if (!in_reach) {
    GiveUpReach(count_);
  } else if (old_end_ >= 0) {
    TightenBound();
  } else {
    bound_ = 0;
    old_capacity_ = 0;
    SetReach();
  }
}

// Until old_end_ is `stop`, at most kBlock positions; or until an entry would lie too far from its home: then
// false. Many positions are empty, at random, so there is no branch on that.
bool TableIndex::MoveBlock(Position stop) {
  struct Moving {
    std::uint64_t stored;
    std::uint32_t location;
    std::uint32_t at;  // positions from `stop` on
  };
  Moving moving[kBlock];
  // Of members the compiler would have to assume that the array overlaps them.
  const Position entry_bytes = entry_bytes_, slack = static_cast<Position>(slack_), reach = reach_;
  const std::uint64_t old_step = old_step_, mask = stored_mask_, capacity = capacity_;
  std::byte* const base = base_;
  Position begin = new_begin_;
  std::uint64_t bound = bound_;
  const std::byte* from = At(old_end_);
  std::size_t n = 0;
  for (Position p = old_end_; p > stop; --p, from -= entry_bytes) {
    std::memcpy(&moving[n].stored, from, 8);
    std::memcpy(&moving[n].location, from + entry_bytes - 4, 4);
    moving[n].at = static_cast<std::uint32_t>(p - stop);
    n += moving[n].location != 0;
  }
  std::memset(At(stop + 1), 0, static_cast<std::size_t>((old_end_ - stop) * entry_bytes));
  std::size_t i = 0;
  for (; i < n; ++i) {
    const std::uint64_t first = FirstHash(stop + moving[i].at - slack, old_step);
    const std::uint64_t h = first + ((moving[i].stored - first) & mask);
    const Position home = slack + static_cast<Position>(Scale(h, capacity));
    const Position to = std::min(home, begin - 1);
    if (home - to > reach) break;
    std::byte* const entry = base + to * entry_bytes;
    std::memcpy(entry, &h, 8);
    std::memcpy(entry + entry_bytes - 4, &moving[i].location, 4);
    begin = to;
    bound = h;
  }
  new_begin_ = begin;
  bound_ = bound;
  old_end_ = i < n ? stop + moving[i].at : stop;
  for (; i < n; ++i) Set(stop + moving[i].at, moving[i].stored, moving[i].location - 1);
  return old_end_ == stop;
}

// Entries of the old part are in reach of their homes, so their h are below this; and whatever is sought
// there must be near enough to be compared with them.
void TableIndex::TightenBound() {
  if (reach_ == kAnyReach) return;
  const Position steps = old_end_ + reach_ + 2 - static_cast<Position>(slack_);
  bound_ = std::min(bound_, FirstHash(steps, old_step_));
}

void TableIndex::WidenSlack() {
  const std::size_t slack = slack_;
  const auto entry_bytes = static_cast<std::size_t>(entry_bytes_);
  Map(2 * slack, capacity_);
  std::memmove(At(static_cast<Position>(slack)), base_, (slack + capacity_) * entry_bytes);
  std::memset(base_, 0, slack * entry_bytes);
  new_begin_ += static_cast<Position>(slack);
}

void TableIndex::GiveUpReach(std::size_t entries) {
  crowded_ = true;
  Rewrite(entries);
}

// Copies all into a new array for so many entries, of the layout that suits them.
void TableIndex::Rewrite(std::size_t entries) {
  TableIndex other;
  other.crowded_ = crowded_;
  other.Reserve(entries);
  std::vector<Entry> some(kEntriesAtOnce);
  Position cursor = DumpBegin();
  while (const std::size_t n = Dump(cursor, some.data(), some.size())) other.Append(some.data(), n);
  *this = std::move(other);
}

}  // namespace tierstore
