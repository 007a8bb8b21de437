// RequestQueues decides in which order a batch reader begins its requests. Every device has a queue of its
// own, so that requests to a slow device do not take the places of requests to other devices.
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "io/env.h"

namespace tierstore {

class RequestQueues {
 public:
  explicit RequestQueues(unsigned devices) : queues_(devices) {}

  // `slots` is the number of requests in flight on all devices together.
  void Prepare(std::span<const ReadRequest> requests, std::size_t slots) {
    requests_ = requests;
    depth_ = std::max<std::size_t>(1, slots / queues_.size());
    std::fill(queues_.begin(), queues_.end(), Queue{});
  }

  // Returns the request to begin now, of the devices in turn. Returns nothing when no request is left, and
  // while all devices that have requests left are busy.
  std::optional<std::size_t> Next() {
    for (std::size_t i = 0; i < queues_.size(); ++i) {
      const std::size_t device = (turn_ + i) % queues_.size();
      Queue& queue = queues_[device];
      if (queue.in_flight == depth_) continue;
      while (queue.next < requests_.size() && requests_[queue.next].device != device) ++queue.next;
      if (queue.next == requests_.size()) continue;
      turn_ = device;
      return queue.next;
    }
    return std::nullopt;
  }
  // Notes that the request which Next returned has begun.
  void Begin() {
    Queue& queue = queues_[turn_];
    ++queue.next;
    ++queue.in_flight;
    turn_ = (turn_ + 1) % queues_.size();
  }
  void End(const ReadRequest& request) { --queues_[request.device].in_flight; }

 private:
  struct Queue {
    std::size_t next = 0;  // no request of the device before this one is left
    std::size_t in_flight = 0;
  };

  std::vector<Queue> queues_;  // by device
  std::span<const ReadRequest> requests_;
  std::size_t depth_ = 1, turn_ = 0;
};

}  // namespace tierstore
