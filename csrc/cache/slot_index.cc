#include "cache/slot_index.h"

#include <algorithm>

#include "common/key.h"

namespace tierstore {
namespace {
// So many accesses to memory are begun before the first of them is waited for.
constexpr std::int64_t kBlock = 32;
}  // namespace

SlotIndex::SlotIndex(const std::uint64_t* keys, std::int64_t stride, std::int64_t capacity)
    : keys_(keys),
      stride_(static_cast<std::uint64_t>(stride)),
      entries_(static_cast<std::size_t>(std::max<std::int64_t>(capacity, 48) * 4 / 3 + 1), kEmpty) {}

std::uint32_t SlotIndex::Tag(std::uint64_t key) { return static_cast<std::uint32_t>(HashKey(key) >> 32); }

void SlotIndex::Find(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) const {
  std::uint32_t tags[kBlock];
  std::uint64_t homes[kBlock];
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, n - begin);
    for (std::int64_t i = 0; i < count; ++i) {
      tags[i] = Tag(keys[begin + i]);
      homes[i] = Home(tags[i]);
      __builtin_prefetch(&entries_[homes[i]]);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint64_t entry = entries_[homes[i]];
      if (entry != kEmpty && EntryTag(entry) == tags[i]) __builtin_prefetch(&Key(EntrySlot(entry)));
    }
    for (std::int64_t i = 0; i < count; ++i) {
      std::int32_t found = -1;
      for (std::uint64_t at = homes[i]; entries_[at] != kEmpty; at = Next(at)) {
        const std::uint64_t entry = entries_[at];
        if (EntryTag(entry) == tags[i] && Key(EntrySlot(entry)) == keys[begin + i]) {
          found = static_cast<std::int32_t>(EntrySlot(entry));
          break;
        }
      }
      slots[begin + i] = found;
    }
  }
}

void SlotIndex::Place(std::uint64_t entry) {
  std::uint64_t at = Home(EntryTag(entry));
  while (entries_[at] != kEmpty) at = Next(at);
  entries_[at] = entry;
}

void SlotIndex::Grow() {
  OwnArray<std::uint64_t> old(entries_.size() * 2, kEmpty);
  std::swap(old, entries_);
  for (const std::uint64_t entry : old) {
    if (entry != kEmpty) Place(entry);
  }
}

void SlotIndex::Insert(const std::int32_t* slots, std::int64_t n) {
  std::uint32_t tags[kBlock];
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, n - begin);
    for (std::int64_t i = 0; i < count; ++i) {
      tags[i] = Tag(Key(static_cast<std::uint32_t>(slots[begin + i])));
      __builtin_prefetch(&entries_[Home(tags[i])], 1);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      if (static_cast<std::uint64_t>(++size_) * 4 > entries_.size() * 3 + 4) Grow();
      Place(std::uint64_t{tags[i]} << 32 | static_cast<std::uint32_t>(slots[begin + i]));
    }
  }
}

void SlotIndex::Erase(const std::int32_t* slots, std::int64_t n) {
  std::uint64_t homes[kBlock];
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, n - begin);
    for (std::int64_t i = 0; i < count; ++i)
      __builtin_prefetch(&Key(static_cast<std::uint32_t>(slots[begin + i])));
    for (std::int64_t i = 0; i < count; ++i) {
      homes[i] = Home(Tag(Key(static_cast<std::uint32_t>(slots[begin + i]))));
      __builtin_prefetch(&entries_[homes[i]], 1);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint64_t at = homes[i];
      while (EntrySlot(entries_[at]) != static_cast<std::uint32_t>(slots[begin + i])) at = Next(at);
      EraseAt(at);
    }
  }
}

void SlotIndex::EraseAt(std::uint64_t hole) {
  // Move later entries of the probe run back into the hole, so that no tombstones are needed.
  const std::uint64_t size = entries_.size();
  for (std::uint64_t at = Next(hole); entries_[at] != kEmpty; at = Next(at)) {
    const std::uint64_t home = Home(EntryTag(entries_[at]));
    const std::uint64_t from_home = at >= home ? at - home : at + size - home;
    const std::uint64_t from_hole = at >= hole ? at - hole : at + size - hole;
    if (from_home >= from_hole) {
      entries_[hole] = entries_[at];
      hole = at;
    }
  }
  entries_[hole] = kEmpty;
  --size_;
}

}  // namespace tierstore
