// One io_uring instance through its three system calls; no liburing. One thread at a time.
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
  // nullptr where the kernel lacks io_uring, refuses it, or is older than 5.6 (which has no plain reads);
  // `error` says why.
  static std::unique_ptr<Uring> Create(unsigned entries, int* error);
  ~Uring();
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  // Makes `memory` buffer 0 of the *Fixed operations; false where the limit on locked memory forbids it.
  bool RegisterBuffer(void* memory, std::size_t size);

  // The next submission entry, zeroed. No more than `entries` may be between here and their completion.
  UringSqe& NextSqe();

  // Submits all new entries and waits until `wait` completions are there. Returns 0 or an errno.
  int SubmitAndWait(unsigned wait);

  // Takes one completion; false when there is none.
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
