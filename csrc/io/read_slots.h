// ReadSlots holds the buffers of a batch reader. One arena is cut for each batch into equal slots, each of
// which holds the batch's largest request. So small reads get the full queue depth, and large reads need no
// more memory.
#pragma once

#include <algorithm>
#include <bit>
#include <span>
#include <stdexcept>
#include <vector>

#include "io/aligned_buffer.h"
#include "io/env.h"

namespace tierstore {

class ReadSlots {
 public:
  struct Slot {
    std::size_t request = 0;
    std::size_t got = 0;        // bytes that have arrived
    bool refused_once = false;  // with EINVAL
  };

  // `depth` is the queue depth of each device.
  ReadSlots(unsigned depth, unsigned devices)
      : depth_(std::size_t{depth} * devices),
        arena_(std::max(depth_ * (32 << 10), devices * kMaxReadBytes)) {}

  // Cuts the arena for these requests, and frees all slots.
  void Prepare(std::span<const ReadRequest> requests) {
    std::size_t largest = kBlockBytes;
    for (const ReadRequest& request : requests) {
      if (request.size == 0 || request.size > kMaxReadBytes || request.size % kBlockBytes != 0 ||
          request.offset % kBlockBytes != 0) {
        throw std::logic_error("a read of " + std::to_string(request.size) + " bytes at offset " +
                               std::to_string(request.offset) + " is not made of blocks");
      }
      largest = std::max<std::size_t>(largest, request.size);
    }
    slot_bytes_ = std::bit_ceil(largest);
    const std::size_t count = std::min(depth_, arena_.size() / slot_bytes_);
    slots_.assign(count, Slot{});
    free_.clear();
    for (std::size_t i = count; i > 0; --i) free_.push_back(static_cast<unsigned>(i - 1));
  }

  std::size_t count() const { return slots_.size(); }
  bool HasFree() const { return !free_.empty(); }
  unsigned Take(std::size_t request) {
    const unsigned slot = free_.back();
    free_.pop_back();
    slots_[slot] = Slot{request, 0, false};
    return slot;
  }
  void Release(unsigned slot) { free_.push_back(slot); }

  Slot& operator[](unsigned slot) { return slots_[slot]; }
  std::byte* data(unsigned slot) { return arena_.data() + slot * slot_bytes_; }
  AlignedBuffer& arena() { return arena_; }

 private:
  const std::size_t depth_;
  AlignedBuffer arena_;
  std::size_t slot_bytes_ = 0;
  std::vector<Slot> slots_;
  std::vector<unsigned> free_;
};

}  // namespace tierstore
