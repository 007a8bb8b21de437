// Implements the memory and the layouts of TableIndex, and moves its entries when it grows.
#include <algorithm>
#include <cstring>
#include <utility>

#include "store/index.h"
#include "store/index_scale.h"

namespace tierstore {
namespace {

constexpr std::size_t kSlack = 256;
constexpr std::size_t kSmall = 1 << 14;  // below this, growth is coarser
constexpr std::int64_t kBlock = 512;
constexpr std::size_t kEntriesAtOnce = 4096;
constexpr std::int64_t kAnyReach = std::int64_t{1} << 48;

// Returns 2^64 / capacity.
std::uint64_t StepOf(std::size_t capacity) {
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(1) << 64) / capacity);
}

}  // namespace

const TableIndex::Layout& TableIndex::LayoutFor(std::size_t rows) const {
  const Layout* layout = &kLayouts[wide_][0];
  for (const Layout& other : kLayouts[wide_]) {
    if (rows >= other.min_rows && !crowded_) layout = &other;
  }
  return *layout;
}

// Sets the layout of an index without entries.
void TableIndex::SetLayout(const Layout& layout, std::size_t capacity) {
  layout_ = &layout;
  entry_bytes_ = layout.entry_bytes;
  format_ = Format(layout);
  most_location_ = layout.MostLocation();
  Map(kSlack, capacity);
  reach_ = ReachOf(format_, capacity);
}

void TableIndex::Map(std::size_t slack, std::size_t capacity) {
  memory_.Extend((slack + capacity) * static_cast<std::size_t>(entry_bytes_));
  base_ = memory_.data();
  slack_ = slack;
  capacity_ = capacity;
  step_ = StepOf(capacity);
  max_count_ = static_cast<std::size_t>(static_cast<double>(capacity) * layout_->max_load);
}

// Entries at p have homes from p to p + reach_, so the hashes that Compare meets differ by little more than
// that. The difference must be less than half of what the stored bits can tell.
TableIndex::Position TableIndex::ReachOf(const Format& format, std::size_t capacity) {
  constexpr Position kMargin = 4;
  const Position half = static_cast<Position>(Scale((format.stored_mask + 1) / 2, capacity));
  return format.compare_shift == 0 ? kAnyReach : half - kMargin;
}

// Begins to grow into a layout of equally long entries.
void TableIndex::BeginGrowth(const Layout& layout) {
  const std::size_t old = capacity_;
  const std::uint64_t step = step_;
  Map(slack_, old + old / (old < kSmall ? 2 : layout.growth));
  layout_ = &layout;
  old_format_ = format_;
  old_reach_ = reach_;
  format_ = Format(layout);
  reach_ = std::min(old_reach_, ReachOf(format_, old));
  old_capacity_ = old;
  old_step_ = step;
  bound_ = kMask48 + 1;
  old_end_ = static_cast<Position>(slack_ + old) - 1;
  new_begin_ = static_cast<Position>(slack_ + capacity_);
  debt_ = 0;
}

// Moves entries, from the right end of the old part on, to their homes by the new capacity or, where a home
// is taken, to the left of the entries that have moved.
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
    most_location_ = layout_->MostLocation();
    reach_ = ReachOf(format_, capacity_);
  }
}

// Moves entries until old_end_ is `stop`, which is at most kBlock positions away. Returns false where an
// entry would lie too far from its home, and stops there. Positions are empty at random, so the code does not
// branch on empty positions.
bool TableIndex::MoveBlock(Position stop) {
  struct Moving {
    std::uint64_t stored;
    Location location;  // plus one
    std::uint32_t at;   // positions from `stop` on
  };
  Moving moving[kBlock];
  // The compiler would have to assume that the array overlaps members, so these are copies.
  const Position entry_bytes = entry_bytes_, slack = static_cast<Position>(slack_), reach = reach_;
  const Format format = format_, old_format = old_format_;
  const std::uint64_t old_step = old_step_, mask = old_format.stored_mask, capacity = capacity_;
  std::byte* const base = base_;
  Position begin = new_begin_;
  std::uint64_t bound = bound_;
  const std::byte* from = At(old_end_);
  std::size_t n = 0;
  for (Position p = old_end_; p > stop; --p, from -= entry_bytes) {
    std::memcpy(&moving[n].stored, from, 8);
    std::memcpy(&moving[n].location, from + entry_bytes - 8, 8);
    moving[n].location >>= old_format.location_shift;
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
    Store(base + to * entry_bytes, entry_bytes, h, moving[i].location, format);
    begin = to;
    bound = h;
  }
  new_begin_ = begin;
  bound_ = bound;
  old_end_ = i < n ? stop + moving[i].at : stop;
  for (; i < n; ++i)
    Store(At(stop + moving[i].at), entry_bytes, moving[i].stored, moving[i].location, old_format);
  return old_end_ == stop;
}

// Entries of the old part are in reach of their homes, so their h are below the bound. An h that is sought
// there must be near enough to be compared with them.
void TableIndex::TightenBound() {
  if (old_reach_ == kAnyReach) return;
  const Position steps = old_end_ + old_reach_ + 2 - static_cast<Position>(slack_);
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

// Makes room in the entries for a location that is too long for some of them. Perhaps only entries that have
// not moved yet are too short.
void TableIndex::Widen(Location location, std::size_t entries) {
  if (old_end_ >= 0) MoveSome(slack_ + capacity_);
  if (location <= most_location_) return;
  wide_ = true;
  Rewrite(entries);
}

// Copies all entries into a new array for this many entries, in the layout for their number.
void TableIndex::Rewrite(std::size_t entries) {
  TableIndex other = EmptyFor(entries);
  std::vector<Entry> some(kEntriesAtOnce);
  Position cursor = DumpBegin();
  while (const std::size_t n = Dump(cursor, some.data(), some.size())) other.Append(some.data(), n);
  *this = std::move(other);
}

bool TableIndex::IsSparse() const { return max_count_ > kSmall && count_ < max_count_ / 4; }

TableIndex TableIndex::Smaller() const { return EmptyFor(count_ + count_ / kLayouts[0][0].growth); }

// Returns an empty index for this many entries, in the order of this index.
TableIndex TableIndex::EmptyFor(std::size_t entries) const {
  TableIndex other;
  other.crowded_ = crowded_;
  other.wide_ = wide_;
  other.order_ = order_;
  other.orders_ = orders_;
  other.Reserve(entries);
  return other;
}

// Sorts all entries anew. Where memory is short, the next entry that crowds the index tries again.
void TableIndex::TakeOwnOrder() try {
  TableIndex other;
  other.wide_ = wide_;
  other.order_ = Permutation::Random();
  other.orders_ = orders_ + 1;
  other.Reserve(count_ + count_ / kLayouts[0][0].growth);
  std::vector<Entry> some(kEntriesAtOnce);
  Position cursor = DumpBegin();
  bool crowds = false;
  while (const std::size_t n = Dump(cursor, some.data(), some.size())) {
    for (std::size_t i = 0; i < n; ++i) other.PutOrdered(order_.IdOf(some[i].hash), some[i].location, crowds);
  }
  *this = std::move(other);
} catch (const std::bad_alloc&) {
}

}  // namespace tierstore
