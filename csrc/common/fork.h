// Keeps from a forked child what it must not share with its parent: descriptors, whose locks and deleted
// files the child would keep alive, and large memory, which the parent would copy page by page while it
// writes.
//
// ForkCount tells a child: objects made before the fork belong to the parent, and their destructors do
// nothing in the child.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <utility>

namespace tierstore {

// Forks between this process and the one that loaded the core. Safe to call at any time.
unsigned ForkCount();

// A forked child does not get the pages of this mapping: touching them there is a segmentation fault.
// `address` and `bytes` are multiples of the page size. Where the kernel refuses, the child gets a copy as
// before.
void KeepFromChildren(void* begin, std::size_t bytes);

// Every fork waits for this mutex, so that a child finds it free and can end what the parent had begun. For
// mutexes that live as long as the process, and under which nothing forks or takes another such mutex.
void HoldAcrossForks(std::mutex& mutex);

// A file descriptor that is closed on destruction, and in every forked child.
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

  // -1 when there is none, as in a forked child.
  int value() const { return fork_count_ == ForkCount() ? value_ : -1; }
  // errno of an `open` that failed, or 0.
  int error() const { return error_; }
  void Close();

 private:
  int value_ = -1;
  unsigned fork_count_ = 0;
  int error_ = 0;
};

}  // namespace tierstore
