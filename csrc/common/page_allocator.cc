#include "common/page_allocator.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <map>
#include <mutex>

#include "common/fork.h"
#include "common/huge_pages.h"

namespace tierstore {
namespace {

constexpr std::size_t kMostKept = std::size_t{4} << 20;

// Arrays of neighbouring batches differ by a few elements: sizes are quarters of powers of two, so that they
// fit in one another's pages. Those that no array reaches are never touched.
std::size_t SizeClass(std::size_t bytes) {
  const std::size_t quarter = std::bit_floor(bytes) / 4;
  const std::size_t step = bytes < kHugePageBytes ? quarter : std::max(quarter, kHugePageBytes);
  return (bytes + step - 1) / step * step;
}

class Kept {
 public:
  // A forked child frees arrays of its parent, too.
  Kept() { HoldAcrossForks(mutex_); }
  void* Take(std::size_t size) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(size);
    if (found == blocks_.end()) return nullptr;
    void* at = found->second;
    blocks_.erase(found);
    bytes_ -= size;
    return at;
  }
  bool Give(void* at, std::size_t size) {
    const std::lock_guard lock(mutex_);
    if (size > kMostKept / 2) return false;
    while (bytes_ + size > kMostKept) {  // makes room by giving back the largest
      const auto last = std::prev(blocks_.end());
      munmap(last->second, last->first);
      bytes_ -= last->first;
      blocks_.erase(last);
    }
    blocks_.emplace(size, at);
    bytes_ += size;
    return true;
  }

 private:
  std::mutex mutex_;
  std::multimap<std::size_t, void*> blocks_;  // by size
  std::size_t bytes_ = 0;
};

// Never destroyed: arrays may be given back while the process ends.
Kept& kept() {
  static Kept& instance = *new Kept;
  return instance;
}

}  // namespace

void* TakePages(std::size_t bytes) {
  const std::size_t size = SizeClass(bytes);
  if (void* at = kept().Take(size)) return at;
  if (size % kHugePageBytes == 0) {
    void* at = MapAligned(size, PROT_READ | PROT_WRITE);
    // Not the last one, so that no more memory is taken than was asked for.
    madvise(at, bytes / kHugePageBytes * kHugePageBytes, MADV_HUGEPAGE);
    return at;
  }
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  return at;
}

void GivePages(void* at, std::size_t bytes) {
  const std::size_t size = SizeClass(bytes);
  if (!kept().Give(at, size)) munmap(at, size);
}

}  // namespace tierstore
