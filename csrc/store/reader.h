// Reads rows: looks all rows up, copies rows that are still in memory, and reads the other rows in the order
// of their places, with rows that are near one another in one request.
//
// Reads come from any thread, beside all other calls. A read takes the store's mutex (store/store_mutex.h)
// for a moment per thousand rows, and none of the mutexes of calls. Files are read without that mutex, one
// batch at a time in each of three lanes. A batch goes to the lane with the least work; but large batches go
// to the first lane only, and the third lane is for small batches. So a small batch never waits until a
// larger one is read, while two threads read ahead. A read holds a segment only until the segment's rows have
// arrived: a writer may wait for that segment's space.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "store/compactor_control.h"
#include "store/context.h"
#include "store/state.h"

namespace tierstore {

struct ReadCounters {
  std::uint64_t rows = 0, bytes = 0, requests = 0;
  std::uint64_t merge_gap_bytes = 0;  // between rows that are read at once; 0 until the device was measured
};

// Says where the rows of a read go: row i goes to `rows` + i·row_bytes, or to `rows` + slots[i]·row_bytes.
struct ReadTarget {
  std::byte* rows;
  std::uint32_t row_bytes;
  const std::int32_t* slots = nullptr;

  std::byte* At(std::size_t i) const {
    const std::size_t slot = slots == nullptr ? i : static_cast<std::size_t>(slots[i]);
    return rows + slot * row_bytes;
  }
  // Returns the target of the rows from row i on.
  ReadTarget From(std::size_t i) const {
    if (slots != nullptr) return {rows, row_bytes, slots + i};
    return {rows + i * row_bytes, row_bytes};
  }
};

class Reader {
 public:
  static constexpr std::uint64_t kNowhere = ~std::uint64_t{0};

  // `reads` counts the reads from files that are under way or wait for a lane.
  Reader(const StoreContext& context, StoreMutex& mutex, StoreState& state, CompactorControl& control,
         std::atomic<int>& reads);

  // These functions do what Store::Read and Store::Places say.
  void Read(std::span<const std::uint64_t> keys, const ReadTarget& target, bool* found);
  void Places(std::span<const std::uint64_t> keys, std::uint64_t* places);

  // Sets the largest gap between rows that one request reads, as an earlier opening has measured it.
  void SetMergeGap(std::uint64_t bytes) { merge_gap_bytes_ = bytes; }
  ReadCounters counters() const { return {read_rows_, read_bytes_, read_requests_, merge_gap_bytes_}; }
  // Names how files are read: "uring", "pread" or a test double. Not after Close.
  std::string io() const { return lanes_[0].reader->name(); }

  // Waits for reads from files; none begins while the result lives.
  [[nodiscard]] auto Exclude() { return std::scoped_lock(lanes_[0].mutex, lanes_[1].mutex, lanes_[2].mutex); }
  // Call it while reads are excluded.
  void Close() {
    for (Lane& lane : lanes_) lane.reader.reset();
  }

 private:
  struct Pending;
  struct Requests;
  struct End;
  struct Lane {
    std::timed_mutex mutex;               // taken before the store's mutex
    std::unique_ptr<BatchReader> reader;  // used with the lane's mutex held; made when first needed
    std::atomic<std::size_t> rows{0};     // rows that are read or wait
  };

  void ReadSome(std::span<const std::uint64_t> keys, const ReadTarget& target, bool* found);
  void Locate(std::span<const std::uint64_t> keys, const ReadTarget& target, bool* found, Pending& pending);
  bool Resolve(std::span<const std::uint64_t> keys, const ReadTarget& target, bool* found, std::size_t base,
               Pending& pending);
  void WakeCompactor();
  Lane& PickLane(std::size_t rows);
  void Measure(BatchReader& reader, const Pending& pending);
  void Fetch(BatchReader& reader, Pending& pending, std::span<const std::uint64_t> keys,
             const ReadTarget& target);

  const StoreContext& context_;
  StoreMutex& mutex_;
  StoreState& state_;
  CompactorControl& control_;
  std::atomic<int>& reads_;
  Lane lanes_[3];
  std::atomic<std::uint64_t> merge_gap_bytes_{0};
  std::atomic<std::uint64_t> read_rows_{0}, read_bytes_{0}, read_requests_{0};
};

}  // namespace tierstore
