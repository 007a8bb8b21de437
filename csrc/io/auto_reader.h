// Reads by io_uring for as long as the kernel allows io_uring, and by pread from then on: a filter on system
// calls may be set after the ring was made.
#pragma once

#include <atomic>
#include <memory>

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

  // After a refusal all requests are made again, also requests that `done` was called for.
  void Read(std::span<const ReadRequest> requests, const Done& done) override {
    if (pread_ == nullptr) {
      try {
        ring_->Read(requests, done);
        return;
      } catch (const RingError&) {
        pread_ = NewPreadReader(queue_depth_, devices_);
        name_ = pread_->name();
      }
    }
    pread_->Read(requests, done);
  }

  const char* name() const override { return name_; }

 private:
  const std::unique_ptr<BatchReader> ring_;  // lives on: the kernel may still write to its memory
  const unsigned queue_depth_, devices_;
  std::unique_ptr<BatchReader> pread_;
  std::atomic<const char*> name_{ring_->name()};
};

}  // namespace tierstore
