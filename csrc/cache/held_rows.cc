#include "cache/held_rows.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

namespace tierstore {
namespace {
std::size_t Positive(std::int64_t value) {
  if (value < 1) throw std::invalid_argument("capacity and row_bytes must be at least 1");
  return static_cast<std::size_t>(value);
}

constexpr std::int64_t kFirstEntries = 1 << 16;  // of the index, which grows
}  // namespace

HeldRows::HeldRows(std::int64_t capacity, std::int64_t row_bytes)
    : capacity_(capacity),
      row_bytes_(row_bytes),
      arena_(Positive(capacity) * Positive(row_bytes)),
      keys_(static_cast<std::size_t>(capacity)),
      states_(static_cast<std::size_t>(capacity)),
      index_(keys_.data(), 1, std::min(capacity, kFirstEntries)) {
  arena_.Commit(static_cast<std::size_t>(capacity * row_bytes));
  keys_.Commit(static_cast<std::size_t>(capacity));
  states_.Commit(static_cast<std::size_t>(capacity));
}

std::int32_t HeldRows::TakeSlot() {
  if (free_.empty()) return static_cast<std::int32_t>(fresh_++);
  const std::int32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

void HeldRows::GiveBack(std::int32_t slot) {
  StateOf(slot) = State::kFree;
  free_.push_back(slot);
}

void HeldRows::Find(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) {
  index_.Find(keys, n, slots);
  for (std::int64_t i = 0; i < n; ++i) {
    if (slots[i] >= 0 && StateOf(slots[i]) != State::kHere) slots[i] = -1;
  }
}

// Takes the keys out of the index. A row on its way is forgotten, and its slot is -1.
void HeldRows::Forget(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) {
  index_.Take(keys, n, slots);
  for (std::int64_t i = 0; i < n; ++i) {
    if (slots[i] < 0 || StateOf(slots[i]) == State::kHere) continue;
    StateOf(slots[i]) = State::kForgotten;
    slots[i] = -1;
  }
}

void HeldRows::Take(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) {
  Release();
  taken_.reserve(static_cast<std::size_t>(n));
  Forget(keys, n, slots);
  std::copy_if(slots, slots + n, std::back_inserter(taken_), [](std::int32_t slot) { return slot >= 0; });
}

void HeldRows::Release() {
  for (const std::int32_t slot : taken_) GiveBack(slot);
  taken_.clear();
}

void HeldRows::Add(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) {
  Discard(keys, n);
  if (n > room()) throw std::length_error("no room for so many rows");
  for (std::int64_t i = 0; i < n; ++i) {
    slots[i] = TakeSlot();
    keys_[static_cast<std::size_t>(slots[i])] = keys[i];
    StateOf(slots[i]) = State::kHere;
  }
  index_.Insert(slots, n);
}

std::int64_t HeldRows::Begin(std::uint64_t* keys, std::int64_t n, std::int32_t* slots) {
  if (n > room()) throw std::length_error("no room for so many rows");
  constexpr std::int64_t kBlock = 32;  // keys that are looked up together
  std::int32_t there[kBlock];
  std::int64_t begun = 0;
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, n - begin), first = begun;
    index_.Find(keys + begin, count, there);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint64_t key = keys[begin + i];
      if (there[i] >= 0 || std::find(keys + first, keys + begun, key) != keys + begun) continue;
      slots[begun] = TakeSlot();
      keys_[static_cast<std::size_t>(slots[begun])] = keys[begun] = key;
      StateOf(slots[begun]) = State::kOnItsWay;
      ++begun;
    }
    index_.Insert(slots + first, begun - first);
  }
  return begun;
}

void HeldRows::Finish(const std::int32_t* slots, const bool* found, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    State& state = StateOf(slots[i]);
    if (state == State::kOnItsWay && found[i]) {
      state = State::kHere;
      continue;
    }
    if (state == State::kOnItsWay) index_.Erase(slots[i]);
    GiveBack(slots[i]);
  }
}

void HeldRows::Discard(const std::uint64_t* keys, std::int64_t n) {
  std::vector<std::int32_t> slots(static_cast<std::size_t>(n));
  Forget(keys, n, slots.data());
  for (const std::int32_t slot : slots) {
    if (slot >= 0) GiveBack(slot);
  }
}

}  // namespace tierstore
