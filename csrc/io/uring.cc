#include "io/uring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

namespace tierstore {
namespace {

constexpr long kSetup = 425, kEnter = 426, kRegister = 427;  // the same on every architecture but alpha
constexpr std::uint32_t kFeatureSingleMmap = 1u << 0;
constexpr std::uint32_t kFeatureRwCurPos = 1u << 3;  // came with the plain reads
constexpr std::uint32_t kEnterGetEvents = 1u << 0;
constexpr off_t kOffsetRings = 0, kOffsetSqes = 0x10000000;

struct SqOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
  std::uint64_t address;
};
struct CqOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
  std::uint64_t address;
};
struct Params {
  std::uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
  SqOffsets sq;
  CqOffsets cq;
};
static_assert(sizeof(Params) == 120);

std::uint32_t LoadAcquire(std::uint32_t* p) {
  return std::atomic_ref<std::uint32_t>(*p).load(std::memory_order_acquire);
}
void StoreRelease(std::uint32_t* p, std::uint32_t value) {
  std::atomic_ref<std::uint32_t>(*p).store(value, std::memory_order_release);
}

void* Map(int descriptor, std::size_t size, off_t offset) {
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, offset);
  if (address == MAP_FAILED) return nullptr;
  KeepFromChildren(address, size);  // a forked child must not move the parent's ring
  return address;
}

}  // namespace

std::unique_ptr<Uring> Uring::Create(unsigned entries, int* error) {
  Params params{};
  std::unique_ptr<Uring> ring(new Uring);
  ring->descriptor_ = OwnDescriptor([&] { return static_cast<int>(syscall(kSetup, entries, &params)); });
  *error = ring->descriptor_.error();
  if (*error != 0) return nullptr;
  *error = ENOSYS;
  if (!(params.features & kFeatureSingleMmap) || !(params.features & kFeatureRwCurPos)) return nullptr;
  ring->rings_.size = std::max<std::size_t>(params.sq.array + params.sq_entries * sizeof(std::uint32_t),
                                            params.cq.cqes + params.cq_entries * sizeof(UringCqe));
  ring->rings_.address = Map(ring->descriptor_.value(), ring->rings_.size, kOffsetRings);
  ring->entries_.size = params.sq_entries * sizeof(UringSqe);
  ring->entries_.address = Map(ring->descriptor_.value(), ring->entries_.size, kOffsetSqes);
  *error = ENOMEM;
  if (ring->rings_.address == nullptr || ring->entries_.address == nullptr) return nullptr;
  *error = 0;
  auto at = [&](std::uint32_t offset) {
    return reinterpret_cast<std::uint32_t*>(static_cast<char*>(ring->rings_.address) + offset);
  };
  ring->sqes_ = static_cast<UringSqe*>(ring->entries_.address);
  ring->cqes_ = reinterpret_cast<UringCqe*>(at(params.cq.cqes));
  ring->sq_tail_ = at(params.sq.tail);
  ring->sq_array_ = at(params.sq.array);
  ring->cq_head_ = at(params.cq.head);
  ring->cq_tail_ = at(params.cq.tail);
  ring->sq_mask_ = *at(params.sq.ring_mask);
  ring->cq_mask_ = *at(params.cq.ring_mask);
  return ring;
}

Uring::~Uring() {
  if (descriptor_.value() < 0) return;  // in a forked child, which has none of the mappings
  if (entries_.address != nullptr) munmap(entries_.address, entries_.size);
  if (rings_.address != nullptr) munmap(rings_.address, rings_.size);
}

bool Uring::RegisterBuffer(void* memory, std::size_t size) {
  const iovec vector{memory, size};
  return syscall(kRegister, descriptor_.value(), 0 /* IORING_REGISTER_BUFFERS */, &vector, 1) == 0;
}

UringSqe& Uring::NextSqe() {
  const std::uint32_t index = (*sq_tail_ + unsubmitted_) & sq_mask_;
  sq_array_[index] = index;
  ++unsubmitted_;
  std::memset(&sqes_[index], 0, sizeof(UringSqe));
  return sqes_[index];
}

int Uring::SubmitAndWait(unsigned wait) {
  StoreRelease(sq_tail_, *sq_tail_ + unsubmitted_);
  unsigned pending = unsubmitted_;
  unsubmitted_ = 0;
  while (true) {
    const long n = syscall(kEnter, descriptor_.value(), pending, wait, kEnterGetEvents, nullptr, 0);
    if (n >= 0) {
      pending -= std::min(pending, static_cast<unsigned>(n));
      if (pending == 0) return 0;
    } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
      return errno;
    }
    // Completions make room for further entries; completions that are there already count towards `wait`.
    wait = std::min(wait, 1u);
    if (LoadAcquire(cq_tail_) != *cq_head_ && pending == 0) return 0;
  }
}

bool Uring::Reap(UringCqe& out) {
  const std::uint32_t head = *cq_head_;
  if (head == LoadAcquire(cq_tail_)) return false;
  out = cqes_[head & cq_mask_];
  StoreRelease(cq_head_, head + 1);
  return true;
}

}  // namespace tierstore
