// Knows the last operation of a GPU on each slot of some rows.
//
// A mark is the number of an operation and its stream: number << kStreamBits | stream; 0 is none. This
// class does not know which operations are done, nor what waits for what. One thread calls at a time.
#pragma once

#include <array>
#include <cstdint>

#include "cache/reserved_memory.h"

namespace tierstore {

class SlotMarks {
 public:
  static constexpr int kStreamBits = 3;
  // The newest mark of each stream, 0 where a stream has no mark.
  using Newest = std::array<std::int64_t, std::size_t{1} << kStreamBits>;

  // Reserves address space for this many slots, none of which has a mark. Throws AddressSpaceError.
  explicit SlotMarks(std::int64_t most) : marks_(static_cast<std::size_t>(most)), most_(most) {}

  // Lets the first `slots` slots have marks from now on. Throws AddressSpaceError, and std::invalid_argument
  // for more slots than the constructor was told.
  void Grow(std::int64_t slots);
  // Gives `slots`, none of which comes twice, this mark; with mark 0 the slots keep their marks. Returns the
  // newest marks that the slots had. Throws std::invalid_argument, and changes nothing, for a slot that may
  // have no mark.
  Newest Touch(const std::int32_t* slots, std::int64_t n, std::int64_t mark);
  // Returns the newest marks of the slots from `first` on.
  Newest From(std::int64_t first) const;

 private:
  ReservedArray<std::int64_t> marks_;
  std::int64_t most_;
  std::int64_t size_ = 0;
};

}  // namespace tierstore
