#include "cache/slot_marks.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <tuple>

#include "common/thread_pool.h"

namespace tierstore {
namespace {

constexpr std::int64_t kPiece = std::int64_t{1} << 14;

void Join(SlotMarks::Newest* newest, std::int64_t mark) {
  std::int64_t& of = (*newest)[static_cast<std::size_t>(mark) & (std::tuple_size_v<SlotMarks::Newest> - 1)];
  of = std::max(of, mark);
}

// Returns the newest of the marks that of(begin, end) gives for all pieces of [begin, end).
template <typename Of>
SlotMarks::Newest Joined(std::int64_t begin, std::int64_t end, const Of& of) {
  SlotMarks::Newest newest{};
  std::mutex mutex;
  ParallelFor(begin, end, kPiece, [&](std::int64_t first, std::int64_t last) {
    const SlotMarks::Newest own = of(first, last);
    const std::lock_guard lock(mutex);
    for (const std::int64_t mark : own) Join(&newest, mark);
  });
  return newest;
}

}  // namespace

void SlotMarks::Grow(std::int64_t slots) {
  if (slots > most_) throw std::invalid_argument("there are not so many slots");
  if (slots <= size_) return;
  marks_.Commit(static_cast<std::size_t>(slots));
  size_ = slots;
}

SlotMarks::Newest SlotMarks::Touch(const std::int32_t* slots, std::int64_t n, std::int64_t mark) {
  std::int64_t least = 0, most = -1;
  for (std::int64_t i = 0; i < n; ++i) {
    least = std::min<std::int64_t>(least, slots[i]);
    most = std::max<std::int64_t>(most, slots[i]);
  }
  if (least < 0 || most >= size_) throw std::invalid_argument("a slot has no memory");
  std::int64_t* const marks = marks_.data();
  return Joined(0, n, [&](std::int64_t begin, std::int64_t end) {
    Newest own{};
    for (std::int64_t i = begin; i < end; ++i) {
      Join(&own, marks[slots[i]]);
      if (mark != 0) marks[slots[i]] = mark;
    }
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
