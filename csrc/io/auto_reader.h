// Reads by io_uring for as long as the kernel allows io_uring, and by pread from then on: a filter on system
// calls may be set after the ring was made.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "io/errors.h"
#include "io/posix_env.h"

namespace tierstore {

// The kernel refuses to enter the ring. Transfers that have begun may still arrive in the ring's own memory.
class RingError : public IoError {
 public:
  explicit RingError(int code)
      : IoError(code, "io_uring", "enter the ring (refused by now; open the store anew with io='pread')") {}
};

class AutoReader final : public BatchReader {
 public:
  AutoReader(std::unique_ptr<BatchReader> ring, unsigned queue_depth, unsigned devices)
      : ring_(std::move(ring)), queue_depth_(queue_depth), devices_(devices) {}

  // After a refusal the requests that `done` was not called for are made again: the files of other requests
  // may be gone.
  void Read(std::span<const ReadRequest> requests, const Done& done) override {
    if (pread_ != nullptr) return pread_->Read(requests, done);
    std::vector<bool> arrived(requests.size());
    try {
      ring_->Read(requests, [&](std::size_t request, const std::byte* data, std::size_t size) {
        arrived[request] = true;
        done(request, data, size);
      });
      return;
    } catch (const RingError&) {
      pread_ = NewPreadReader(queue_depth_, devices_);
      name_ = pread_->name();
    }
    std::vector<ReadRequest> left;
    std::vector<std::size_t> numbers;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      if (arrived[i]) continue;
      left.push_back(requests[i]);
      numbers.push_back(i);
    }
    pread_->Read(left, [&](std::size_t request, const std::byte* data, std::size_t size) {
      done(numbers[request], data, size);
    });
  }

  const char* name() const override { return name_; }

 private:
  const std::unique_ptr<BatchReader> ring_;  // lives on: the kernel may still write to its memory
  const unsigned queue_depth_, devices_;
  std::unique_ptr<BatchReader> pread_;
  std::atomic<const char*> name_{ring_->name()};
};

}  // namespace tierstore
