#include "cache/held_rows.h"

#include <stdexcept>

namespace tierstore {
namespace {
std::size_t Positive(std::int64_t value) {
  if (value < 1) throw std::invalid_argument("capacity and row_bytes must be at least 1");
  return static_cast<std::size_t>(value);
}
}  // namespace

HeldRows::HeldRows(std::int64_t capacity, std::int64_t row_bytes)
    : capacity_(capacity),
      row_bytes_(row_bytes),
      arena_(Positive(capacity) * Positive(row_bytes)),
      keys_(static_cast<std::size_t>(capacity)),
      index_(keys_.data(), 1, capacity) {
  arena_.Commit(static_cast<std::size_t>(capacity * row_bytes));
  keys_.Commit(static_cast<std::size_t>(capacity));
}

void HeldRows::Add(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) {
  if (n > capacity_ - size()) throw std::length_error("no room for so many rows");
  for (std::int64_t i = 0; i < n; ++i) {
    std::int32_t slot = static_cast<std::int32_t>(fresh_);
    if (free_.empty()) {
      ++fresh_;
    } else {
      slot = free_.back();
      free_.pop_back();
    }
    keys_[static_cast<std::size_t>(slot)] = keys[i];
    slots[i] = slot;
  }
  index_.Insert(slots, n);
}

void HeldRows::Remove(const std::int32_t* slots, std::int64_t n) {
  index_.Erase(slots, n);
  free_.insert(free_.end(), slots, slots + n);
}

void HeldRows::Discard(const std::uint64_t* keys, std::int64_t n) {
  std::vector<std::int32_t> slots(static_cast<std::size_t>(n));
  Find(keys, n, slots.data());
  std::erase(slots, -1);
  Remove(slots.data(), static_cast<std::int64_t>(slots.size()));
}

}  // namespace tierstore
