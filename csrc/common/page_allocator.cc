#include "common/page_allocator.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

#include "common/fork.h"
#include "common/huge_pages.h"

namespace tierstore {
namespace {

// What is kept of arrays that were given back. Lookups of many ids have arrays with a number for each id, and
// on many processors they would wait for the system's pages: where such lookups go on, as much is kept as
// kArrays of their arrays.
constexpr std::size_t kLeastMost = std::size_t{16} << 20, kMost = std::size_t{128} << 20, kArrays = 8;
constexpr std::size_t kLarge = kLeastMost / kArrays;
constexpr int kPeriod = 1024, kGoOn = 64;  // arrays; so many large ones among those of a period

// Arrays of neighbouring batches differ by a few elements. Sizes are quarters of powers of two, so that such
// arrays fit in one another's pages. Pages that no array reaches are never touched.
std::size_t SizeClass(std::size_t bytes) {
  const std::size_t quarter = std::bit_floor(bytes) / 4;
  const std::size_t step = bytes < kHugePageBytes ? quarter : std::max(quarter, kHugePageBytes);
  return (bytes + step - 1) / step * step;
}

class Kept {
 public:
  // A forked child frees arrays of its parent, too, so the child must find the mutex free.
  Kept() { HoldAcrossForks(mutex_); }
  void* Take(std::size_t size) {
    const std::lock_guard lock(mutex_);
    if (size > kLarge && ++large_ >= kGoOn) most_ = std::clamp(kArrays * size, most_, kMost);
    if (++taken_ == kPeriod) {
      if (large_ < kGoOn) most_ = kLeastMost;
      taken_ = large_ = 0;
    }
    const auto found = std::find_if(blocks_.rbegin(), blocks_.rend(),
                                    [size](const Block& block) { return block.size == size; });
    if (found == blocks_.rend()) return nullptr;
    void* at = found->at;
    blocks_.erase(std::prev(found.base()));
    bytes_ -= size;
    return at;
  }
  bool Give(void* at, std::size_t size) {
    const std::lock_guard lock(mutex_);
    if (size > most_ / 2) return false;
    // The blocks that nobody has wanted for the longest time make room. If the largest blocks made room
    // instead, small blocks of one large batch would keep out blocks that every batch needs.
    auto end = blocks_.begin();
    for (; bytes_ + size > most_; ++end) {
      munmap(end->at, end->size);
      bytes_ -= end->size;
    }
    blocks_.erase(blocks_.begin(), end);
    blocks_.push_back({at, size});
    bytes_ += size;
    return true;
  }

 private:
  struct Block {
    void* at;
    std::size_t size;
  };
  std::mutex mutex_;
  std::vector<Block> blocks_;  // in the order in which they were given back
  std::size_t bytes_ = 0;
  std::size_t most_ = kLeastMost;
  int taken_ = 0, large_ = 0;  // arrays of this period
};

// The instance is never destroyed, since arrays may be given back while the process ends.
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
    // The last page, which the array fills in part, is no huge page: it would take more memory than was asked
    // for.
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
