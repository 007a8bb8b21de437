#include "cache/slot_marks.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <tuple>

#include "common/thread_pool.h"

namespace tierstore {
namespace {

// One thread marks this many slots at a time, so that 16 threads have three pieces each of 400,000 slots.
constexpr std::int64_t kPiece = std::int64_t{1} << 13;
// One thread checks this many slots at a time, without their marks.
constexpr std::int64_t kCheckedPiece = std::int64_t{1} << 16;
// Marks are read in no order, each from another line of the cache.
constexpr std::int64_t kAhead = 24;

void Join(SlotMarks::Newest* newest, std::int64_t mark) {
  std::int64_t& of = (*newest)[static_cast<std::size_t>(mark) & (std::tuple_size_v<SlotMarks::Newest> - 1)];
  if (mark > of) of = mark;  // rare, so a branch takes less time than to write each time
}

// Returns the newest of the marks that of(begin, end) gives for all pieces of [begin, end).
template <typename Of>
SlotMarks::Newest Joined(std::int64_t begin, std::int64_t end, const Of& of) {
  if (end - begin <= kPiece) return of(begin, end);
  SlotMarks::Newest newest{};
  std::mutex mutex;
  ParallelFor(begin, end, kPiece, [&](std::int64_t first, std::int64_t last) {
    const SlotMarks::Newest own = of(first, last);
    const std::lock_guard lock(mutex);
    for (const std::int64_t mark : own) Join(&newest, mark);
  });
  return newest;
}

bool AreBelow(const std::int32_t* slots, std::int64_t n, std::int64_t size) {
  const auto bound = static_cast<std::uint32_t>(std::min(size, std::int64_t{1} << 31));
  std::atomic<bool> found{false};
  ParallelFor(0, n, kCheckedPiece, [&](std::int64_t begin, std::int64_t end) {
    std::uint32_t is_beyond = 0;  // a negative slot is beyond 2^31
    for (std::int64_t i = begin; i < end; ++i)
      is_beyond |= static_cast<std::uint32_t>(static_cast<std::uint32_t>(slots[i]) >= bound);
    if (is_beyond != 0) found.store(true, std::memory_order_relaxed);
  });
  return !found.load(std::memory_order_relaxed);
}

}  // namespace

void SlotMarks::Grow(std::int64_t slots) {
  if (slots > most_) throw std::invalid_argument("there are not so many slots");
  if (slots <= size_) return;
  marks_.Commit(static_cast<std::size_t>(slots));
  size_ = slots;
}

SlotMarks::Newest SlotMarks::Touch(const std::int32_t* slots, std::int64_t n, std::int64_t mark) {
  if (!AreBelow(slots, n, size_)) throw std::invalid_argument("a slot has no memory");
  std::int64_t* const marks = marks_.data();
  return Joined(0, n, [&](std::int64_t begin, std::int64_t end) {
    Newest own{};
    const auto look = [&](std::int64_t i) {
      std::int64_t& at = marks[slots[i]];
      Join(&own, at);
      if (mark != 0) at = mark;
    };
    std::int64_t i = begin;
    for (; i < end - kAhead; ++i) {
      __builtin_prefetch(&marks[slots[i + kAhead]], 1);
      look(i);
    }
    for (; i < end; ++i) look(i);
    return own;
  });
}

SlotMarks::Newest SlotMarks::From(std::int64_t first) const {
  const std::int64_t* const marks = marks_.data();
  return Joined(std::min(first, size_), size_, [&](std::int64_t begin, std::int64_t end) {
    Newest own{};
    for (std::int64_t slot = begin; slot < end; ++slot) Join(&own, marks[slot]);
    return own;
  });
}

}  // namespace tierstore
