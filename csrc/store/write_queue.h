// The write queue has two threads for each device that write chunks to their files, so that the device always
// has a next write. Chunks leave memory in the order in which they were queued.
//
// The queue shares the store's mutex: every function is called with the mutex held; a function with a `Lock&`
// releases the mutex while it waits. When a write fails no new write begins. ThrowPending hands the error to
// one call and lets the threads try that write again, so no accepted row is lost while the store is open.
//
// While rows are read from files, writes are smaller and made one at a time on each device, so that reads
// keep their latency. Writes never stop.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "store/segment.h"
#include "store/store_mutex.h"

namespace tierstore {

// Ends work of a background thread when the store closes or an error waits to be thrown.
struct Interrupted {};

class WriteQueue {
 public:
  // Queues at most `bytes_per_device` for each of `devices`. `reads` is the number of reads under way.
  // `written` is called with the mutex held when a chunk has left memory.
  WriteQueue(std::mutex& mutex, std::size_t bytes_per_device, unsigned devices, const std::atomic<int>& reads,
             std::function<void(const SegmentPtr&)> written);
  ~WriteQueue();

  // Begins a chunk of this many bytes at `offset`; waits while too much is queued. Throws the pending error,
  // or, in the background, Interrupted.
  std::shared_ptr<Chunk> NewChunk(Lock& lock, std::uint64_t offset, std::size_t bytes, bool background);
  // Queues the chunk's bytes from `queued` to `end`, a multiple of kBlockBytes within the chunk.
  void Enqueue(const SegmentPtr& segment, const std::shared_ptr<Chunk>& chunk, std::size_t end);
  // Ends a chunk: it leaves memory once all its queued bytes are written.
  void Close(const SegmentPtr& segment, const std::shared_ptr<Chunk>& chunk);
  // Waits until all bytes that are queued now are written, or throws.
  void Drain(Lock& lock);
  void ThrowPending();
  bool HasError() const { return error_ != nullptr; }
  // Queues an error of another background thread, unless an error waits already.
  void Report(std::exception_ptr error);
  // Drops queued bytes and ends the threads; later calls that would wait throw ClosedError.
  void Stop(Lock& lock);

  std::uint64_t enqueued_bytes() const { return written_bytes_ + queued_bytes_; }
  std::uint64_t written_bytes() const { return written_bytes_; }
  std::size_t memory_bytes() const { return memory_bytes_; }

 private:
  struct Task {
    enum class State { kWaiting, kTaken, kDone };

    SegmentPtr segment;
    std::shared_ptr<Chunk> chunk;
    std::size_t begin, end;
    unsigned device;  // the device of the first byte
    State state = State::kWaiting;
  };
  static constexpr std::size_t kThreadsPerDevice = 2;

  void Run(unsigned device);
  std::vector<Task*> TakeTurn(unsigned device);
  void WriteOut(const Task& task);
  void Finish(const Task& task);
  void ReleaseIfDone(const SegmentPtr& segment, const std::shared_ptr<Chunk>& chunk);

  std::mutex& mutex_;
  const std::size_t max_queued_bytes_;
  const std::atomic<int>& reads_;
  // Each device has a mutex that the thread holds whose write is under way beside reads. No thread takes it
  // together with mutex_.
  std::vector<std::mutex> paced_;
  const std::function<void(const SegmentPtr&)> written_;
  std::condition_variable work_, progress_;
  std::deque<Task> tasks_;  // not finished, in the order of queueing
  std::vector<AlignedBuffer> spare_;
  std::size_t queued_bytes_ = 0, memory_bytes_ = 0;
  std::uint64_t enqueued_ = 0, finished_ = 0, failures_ = 0, written_bytes_ = 0;
  std::exception_ptr error_;  // the error that no call was handed yet
  bool paused_ = false;       // a write has failed
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tierstore
