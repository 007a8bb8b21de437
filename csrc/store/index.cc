#include "store/index.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
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
constexpr std::size_t kPrefetch = 16;
constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kHugePage = 2 << 20;

constexpr std::size_t RoundUp(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Address space that begins at a huge page's boundary.
std::byte* ReserveAligned(std::size_t bytes) {
  void* address =
      mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw std::bad_alloc();
  auto* const begin = static_cast<std::byte*>(address);
  auto* const aligned =
      reinterpret_cast<std::byte*>(RoundUp(reinterpret_cast<std::uintptr_t>(begin), kHugePage));
  if (aligned > begin) munmap(begin, static_cast<std::size_t>(aligned - begin));
  munmap(aligned + bytes, static_cast<std::size_t>(begin + kHugePage - aligned));
  return aligned;
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

TableIndex::TableIndex() { Map(kSlack, kInitialCapacity); }

TableIndex::~TableIndex() { munmap(base_, reserved_bytes_); }

// An entry is the hash in 6 bytes and the location plus one in 4; all zero is empty.
inline bool TableIndex::IsEmpty(Position p) const {
  std::uint32_t stored;
  std::memcpy(&stored, At(p) + 6, sizeof stored);
  return stored == 0;
}

inline std::uint64_t TableIndex::HashAt(Position p) const {
  std::uint64_t word;
  std::memcpy(&word, At(p), sizeof word);
  return word & kMask48;
}

inline std::uint32_t TableIndex::LocationAt(Position p) const {
  std::uint32_t stored;
  std::memcpy(&stored, At(p) + 6, sizeof stored);
  return stored - 1;
}

inline void TableIndex::Set(Position p, std::uint64_t h, std::uint32_t location) {
  const std::uint32_t stored = location + 1;
  std::memcpy(At(p), &h, 6);
  std::memcpy(At(p) + 6, &stored, sizeof stored);
}

inline void TableIndex::Clear(Position p) { std::memset(At(p), 0, kEntryBytes); }

inline TableIndex::Position TableIndex::Home(std::uint64_t h) const {
  const auto scale = [this](std::uint64_t hash, std::size_t capacity) {
    return static_cast<Position>(
        slack_ + static_cast<std::size_t>((static_cast<unsigned __int128>(hash) * capacity) >> 48));
  };
  return h >= bound_ ? scale(h, capacity_) : std::min(scale(h, old_capacity_), old_end_);
}

// The upper bits of h reversed, which is its own inverse: the order of List.
inline std::uint64_t TableIndex::SwapStripe(std::uint64_t h) {
  std::uint64_t stripe = h >> kStripeShift, reversed = 0;
  for (int bit = kStripeShift; bit < 48; ++bit, stripe >>= 1) reversed = reversed << 1 | (stripe & 1);
  return reversed << kStripeShift | (h & kWithinStripe);
}

TableIndex::Position TableIndex::Seek(std::uint64_t h) const {
  // Position 0 is always empty, so the search ends. An entry smaller than h means absent: the empty position
  // 0 then stands for "not there".
  Position p = Home(h);
  while (!IsEmpty(p)) {
    const std::uint64_t there = HashAt(p);
    if (there == h) return p;
    if (there < h) return 0;
    --p;
  }
  return p;
}

std::uint32_t TableIndex::Find(std::uint64_t id) const { return LocationAt(Seek(Permute(id))); }

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
      // An entry may lie across two cache lines, and is as often in the one to the left.
      const std::byte* const home = At(Home(Permute(ids[i + kPrefetch])));
      __builtin_prefetch(home + kEntryBytes - 1, 1);
      __builtin_prefetch(home + kEntryBytes - 1 - kCacheLine, 1);
    }
    previous[i] = Put(ids[i], locations[i]);
  }
}

std::uint32_t TableIndex::Put(std::uint64_t id, std::uint32_t location) {
  const std::uint64_t h = Permute(id);
  const Position p = Seek(h);
  if (!IsEmpty(p)) {
    const std::uint32_t previous = LocationAt(p);
    Set(p, h, location);
    return previous;
  }
  if (old_end_ >= 0) {
    debt_ += kMovesPerInsert;
    if (debt_ >= kMovesAtOnce) MoveSome(std::exchange(debt_, 0));
  } else if (count_ >= capacity_ / 10 * 9) {
    BeginGrowth();
  }
  Insert(h, location);
  ++count_;
  return kAbsent;
}

// h is not there. Entries between its place and the next empty one to the left, all smaller, move left by
// one.
void TableIndex::Insert(std::uint64_t h, std::uint32_t location) {
  while (true) {
    Position place = Home(h);
    while (!IsEmpty(place) && HashAt(place) > h) --place;
    Position empty = place;
    while (!IsEmpty(empty)) --empty;
    if (empty > 0) {
      std::memmove(At(empty), At(empty + 1), static_cast<std::size_t>(place - empty) * kEntryBytes);
      Set(place, h, location);
      if (h >= bound_) {
        if (empty <= old_end_) --old_end_;  // the new part takes a position from the old one
        new_begin_ = std::min(new_begin_, empty <= old_end_ + 1 ? old_end_ + 1 : empty);
      }
      return;
    }
    // Position 0 must stay empty.
    if (old_end_ >= 0) {
      MoveSome(slack_ + capacity_);
    } else {
      WidenSlack();
    }
  }
}

std::uint64_t TableIndex::List(std::uint64_t cursor, std::size_t limit, std::vector<std::uint64_t>& ids,
                               std::vector<std::uint32_t>* locations) const {
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

std::size_t TableIndex::Dump(std::int64_t& cursor, Entry* out, std::size_t limit) const {
  std::size_t n = 0;
  while (n < limit && cursor > 0) {
    --cursor;
    if (!IsEmpty(cursor)) out[n++] = {HashAt(cursor), LocationAt(cursor)};
  }
  return n;
}

void TableIndex::Reserve(std::size_t entries) {
  if (count_ == 0 && entries > capacity_ / 10 * 8) Map(slack_, entries + entries / 7);
  new_begin_ = static_cast<Position>(slack_ + capacity_);
}

bool TableIndex::Append(const Entry* entries, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t h = entries[i].hash;
    if (h > kMask48 || entries[i].location > kMaxLocation) return false;
    const Position to = std::min(Home(h), new_begin_ - 1);
    if (to <= 0 || (count_ > 0 && HashAt(new_begin_) <= h)) return false;
    Set(to, h, entries[i].location);
    new_begin_ = to;
    ++count_;
  }
  return true;
}

void TableIndex::Map(std::size_t slack, std::size_t capacity) {
  // Eight bytes are loaded at once, also from the last entry.
  const std::size_t bytes = RoundUp((slack + capacity) * kEntryBytes + 8, 4096);
  if (bytes > mapped_bytes_) Extend(bytes);
  slack_ = slack;
  capacity_ = capacity;
}

// A large index gets address space to grow into, aligned, so that it keeps its huge pages when it does grow
// or move: most of what a lookup costs is the walk to a page that is not in the TLB.
void TableIndex::Extend(std::size_t bytes) {
  if (bytes < kHugePage) {
    void* address = base_ == nullptr
                        ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                        : mremap(base_, mapped_bytes_, bytes, MREMAP_MAYMOVE);
    if (address == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<std::byte*>(address);
    reserved_bytes_ = mapped_bytes_ = bytes;
    return;
  }
  if (bytes > reserved_bytes_) {
    const std::size_t reserve = RoundUp(4 * bytes, kHugePage);
    std::byte* const to = ReserveAligned(reserve);
    if (base_ != nullptr) {
      if (mremap(base_, mapped_bytes_, mapped_bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED) {
        munmap(to, reserve);
        throw std::bad_alloc();
      }
      munmap(base_ + mapped_bytes_, reserved_bytes_ - mapped_bytes_);
    }
    base_ = to;
    reserved_bytes_ = reserve;
  }
  if (mprotect(base_ + mapped_bytes_, bytes - mapped_bytes_, PROT_READ | PROT_WRITE) != 0)
    throw std::bad_alloc();
  madvise(base_, bytes, MADV_HUGEPAGE);
  mapped_bytes_ = bytes;
}

void TableIndex::BeginGrowth() {
  const std::size_t old = capacity_;
  Map(slack_, old + (old < kSmall ? old / 2 : old / 16));
  old_capacity_ = old;
  bound_ = kMask48 + 1;
  old_end_ = static_cast<Position>(slack_ + old) - 1;
  new_begin_ = static_cast<Position>(slack_ + capacity_);
  debt_ = 0;
}

// Entries from the right end of the old part on move to their home by the new capacity or, where that is
// taken, to the left of what has moved. Every tenth position is empty, at random: so without branches on
// that.
void TableIndex::MoveSome(std::size_t positions) {
  const Position stop = std::max<Position>(old_end_ - static_cast<Position>(positions), -1);
  const std::size_t capacity = capacity_;
  const auto slack = static_cast<Position>(slack_);
  Position begin = new_begin_;
  std::uint64_t bound = bound_;
  for (Position p = old_end_; p > stop; --p) {
    std::byte* from = At(p);
    std::uint64_t head;
    std::uint16_t tail;
    std::memcpy(&head, from, 8);
    std::memcpy(&tail, from + 8, 2);
    const bool occupied = (head >> 48 | tail) != 0;
    const std::uint64_t h = head & kMask48;
    const auto home = slack + static_cast<Position>((static_cast<unsigned __int128>(h) * capacity) >> 48);
    const Position to = occupied ? std::min(home, begin - 1) : p;
    std::memset(from, 0, kEntryBytes);
    std::memcpy(At(to), &head, 8);
    std::memcpy(At(to) + 8, &tail, 2);
    begin = occupied ? to : begin;
    bound = occupied ? h : bound;
  }
  old_end_ = stop;
  new_begin_ = begin;
  bound_ = bound;
  if (old_end_ < 0) {
    bound_ = 0;
    old_capacity_ = 0;
  }
}

void TableIndex::WidenSlack() {
  const std::size_t slack = slack_, used = (slack + capacity_) * kEntryBytes;
  Map(2 * slack, capacity_);
  std::memmove(At(static_cast<Position>(slack)), base_, used);
  std::memset(base_, 0, slack * kEntryBytes);
}

}  // namespace tierstore
