// Uring is one io_uring instance, used through the kernel's three system calls and without liburing. One
// thread at a time may use a Uring.
//
// The structures follow the kernel's stable interface (include/uapi/linux/io_uring.h). They are written out
// here so that the core builds where the system's headers are older than its kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "common/fork.h"

namespace tierstore {

struct UringSqe {
  std::uint8_t opcode;
  std::uint8_t flags;
  std::uint16_t ioprio;
  std::int32_t fd;
  std::uint64_t offset;
  std::uint64_t address;
  std::uint32_t length;
  std::uint32_t rw_flags;
  std::uint64_t user_data;
  std::uint16_t buffer_index;
  std::uint16_t personality;
  std::int32_t file_index;
  std::uint64_t padding[2];
};
static_assert(sizeof(UringSqe) == 64);

struct UringCqe {
  std::uint64_t user_data;
  std::int32_t result;
  std::uint32_t flags;
};
static_assert(sizeof(UringCqe) == 16);

inline constexpr std::uint8_t kUringReadFixed = 4;
inline constexpr std::uint8_t kUringRead = 22;

class Uring {
 public:
  // Returns nullptr where the kernel lacks io_uring, refuses io_uring, or is older than 5.6 (the first kernel
  // with plain reads); `error` gets the errno.
  static std::unique_ptr<Uring> Create(unsigned entries, int* error);
  ~Uring();
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  // Makes `memory` buffer 0 of the *Fixed operations. Returns false where the limit on locked memory forbids
  // that.
  bool RegisterBuffer(void* memory, std::size_t size);

  // Returns the next submission entry, zeroed. No more than `entries` may be between this call and their
  // completion.
  UringSqe& NextSqe();

  // Submits all new entries and waits until `wait` completions are there. Returns 0 or an errno.
  int SubmitAndWait(unsigned wait);

  // Takes one completion. Returns false when there is none.
  bool Reap(UringCqe& out);

 private:
  Uring() = default;

  struct Mapping {
    void* address = nullptr;
    std::size_t size = 0;
  };

  OwnDescriptor descriptor_;
  Mapping rings_, entries_;
  UringSqe* sqes_ = nullptr;
  UringCqe* cqes_ = nullptr;
  std::uint32_t *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  std::uint32_t sq_mask_ = 0, cq_mask_ = 0;
  unsigned unsubmitted_ = 0;
};

}  // namespace tierstore
