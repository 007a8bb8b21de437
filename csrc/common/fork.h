// Keeps from a forked child what the child must not share with its parent: descriptors, whose locks and
// deleted files the child would keep alive, and large memory, which the parent would copy page by page while
// the parent writes.
//
// By ForkCount a child knows which objects were made before the fork: they belong to the parent, and their
// destructors do nothing in the child.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <utility>

namespace tierstore {

// Returns the number of forks between this process and the process that loaded the core. Safe to call at any
// time.
unsigned ForkCount();

// Keeps the pages of this mapping from forked children: a child that touches them gets a segmentation fault.
// `begin` and `bytes` are multiples of the page size. Where the kernel refuses, the child gets a copy as
// usual.
void KeepFromChildren(void* begin, std::size_t bytes);

// Makes every fork wait for this mutex, so that a child finds the mutex free and the data whole. The mutex
// lives as long as the process. Code that holds the mutex neither forks nor takes another such mutex.
void HoldAcrossForks(std::mutex& mutex);

// Owns a file descriptor, which is closed on destruction and in every forked child.
class OwnDescriptor {
 public:
  OwnDescriptor() = default;
  // `open` returns a descriptor, or -1 with errno set. No fork comes between the call and the registration,
  // so `open` must be quick and must not fork.
  explicit OwnDescriptor(const std::function<int()>& open);
  OwnDescriptor(OwnDescriptor&& other) noexcept { *this = std::move(other); }
  OwnDescriptor& operator=(OwnDescriptor&& other) noexcept {
    std::swap(value_, other.value_);
    std::swap(fork_count_, other.fork_count_);
    std::swap(error_, other.error_);
    return *this;
  }
  ~OwnDescriptor() { Close(); }

  // Returns -1 when there is no descriptor, as in a forked child.
  int value() const { return fork_count_ == ForkCount() ? value_ : -1; }
  // Returns errno of an `open` that failed, or 0.
  int error() const { return error_; }
  void Close();

 private:
  int value_ = -1;
  unsigned fork_count_ = 0;
  int error_ = 0;
};

}  // namespace tierstore
