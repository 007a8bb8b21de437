#include "store/write_queue.h"

#include <algorithm>
#include <cstring>

#include "common/call_limit.h"
#include "store/errors.h"

namespace tierstore {

namespace {
// A thread writes this many bytes between two times that it takes the mutex. The mutex may be held as long as
// a few of these writes take, and the device must not wait that long.
constexpr std::size_t kBytesPerTurn = 4 << 20;
constexpr std::size_t kPacedBytes = 256 << 10;  // of one write beside reads
}  // namespace

WriteQueue::WriteQueue(std::mutex& mutex, std::size_t bytes_per_device, unsigned devices,
                       const std::atomic<int>& reads, std::function<void(const SegmentPtr&)> written)
    : mutex_(mutex),
      max_queued_bytes_(bytes_per_device * devices),
      reads_(reads),
      paced_(devices),
      written_(std::move(written)) {
  for (std::size_t i = 0; i < kThreadsPerDevice * devices; ++i)
    threads_.emplace_back([this, device = static_cast<unsigned>(i % devices)] { Run(device); });
}

WriteQueue::~WriteQueue() {
  Lock lock(mutex_);
  Stop(lock);
}

std::shared_ptr<Chunk> WriteQueue::NewChunk(Lock& lock, std::uint64_t offset, std::size_t bytes,
                                            bool background) {
  WaitInCall(progress_, lock,
             [this] { return stop_ || error_ != nullptr || queued_bytes_ < max_queued_bytes_; });
  if (background && (stop_ || error_ != nullptr)) throw Interrupted{};
  ThrowPending();
  auto chunk = std::make_shared<Chunk>();
  chunk->offset = offset;
  chunk->pooled = true;
  if (spare_.empty() || spare_.back().size() < bytes) {
    chunk->buffer = AlignedBuffer(bytes);
    memory_bytes_ += bytes;
  } else {
    chunk->buffer = std::move(spare_.back());
    spare_.pop_back();
  }
  return chunk;
}

void WriteQueue::Enqueue(const SegmentPtr& segment, const std::shared_ptr<Chunk>& chunk, std::size_t end) {
  const unsigned device = segment->file->DeviceOf(chunk->offset + chunk->queued);
  tasks_.push_back(Task{segment, chunk, chunk->queued, end, device});
  queued_bytes_ += end - chunk->queued;
  chunk->queued = end;
  segment->unsynced = true;
  ++enqueued_;
  paced_.size() == 1 ? work_.notify_one() : work_.notify_all();
}

void WriteQueue::Drain(Lock& lock) {
  const std::uint64_t last = enqueued_;
  WaitInCall(progress_, lock, [&] { return stop_ || error_ != nullptr || finished_ >= last; });
  ThrowPending();
}

void WriteQueue::ThrowPending() {
  if (stop_) throw ClosedError("the store is closed");
  if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  if (paused_) {
    paused_ = false;
    work_.notify_all();
  }
}

void WriteQueue::Report(std::exception_ptr error) {
  if (error_ == nullptr) error_ = std::move(error);
  progress_.notify_all();
}

void WriteQueue::Stop(Lock& lock) {
  stop_ = true;
  work_.notify_all();
  progress_.notify_all();
  if (threads_.empty()) return;
  std::vector<std::thread> threads = std::exchange(threads_, {});
  lock.unlock();
  for (std::thread& thread : threads) thread.join();
  lock.lock();
  tasks_.clear();
}

// Returns the next tasks for one thread of the device, and none while writes fail.
std::vector<WriteQueue::Task*> WriteQueue::TakeTurn(unsigned device) {
  std::vector<Task*> turn;
  std::size_t bytes = 0;
  for (auto task = tasks_.begin(); task != tasks_.end() && bytes < kBytesPerTurn && !paused_; ++task) {
    if (task->state != Task::State::kWaiting || task->device != device) continue;
    task->state = Task::State::kTaken;
    bytes += task->end - task->begin;
    turn.push_back(&*task);  // stays in its place while tasks come and go at the ends
  }
  return turn;
}

void WriteQueue::Run(unsigned device) {
  Lock lock(mutex_);
  std::vector<Task*> turn;
  while (true) {
    work_.wait(lock, [&] { return stop_ || !(turn = TakeTurn(device)).empty(); });
    if (stop_) return;
    std::size_t written = 0;
    std::exception_ptr error;
    const std::uint64_t failures = failures_;
    lock.unlock();
    try {
      for (; written < turn.size(); ++written) WriteOut(*turn[written]);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    for (std::size_t i = 0; i < turn.size(); ++i) {
      turn[i]->state = i < written ? Task::State::kDone : Task::State::kWaiting;
    }
    for (; !tasks_.empty() && tasks_.front().state == Task::State::kDone; tasks_.pop_front())
      Finish(tasks_.front());
    // When the other thread has failed meanwhile, its error was reported, and the tasks that this thread
    // could not write are tried again.
    if (error != nullptr && failures == failures_) {
      ++failures_;
      paused_ = true;
      Report(error);
    }
    progress_.notify_all();
  }
}

// Call it without the mutex. Beside reads the threads of a device write in turns.
void WriteQueue::WriteOut(const Task& task) {
  const std::byte* bytes = task.chunk->buffer.data();
  AlignedBuffer encoded;
  if (task.chunk->encode) {
    const Bytes made = task.chunk->encode();
    encoded = AlignedBuffer(made.size());
    std::memcpy(encoded.data(), made.data(), made.size());
    bytes = encoded.data();
  }
  for (std::size_t at = task.begin; at < task.end;) {
    std::unique_lock paced(paced_[task.device], std::defer_lock);
    std::size_t end = task.end;
    if (reads_ > 0) {
      paced.lock();
      end = std::min(end, at + kPacedBytes);
    }
    task.segment->file->Write(task.chunk->offset + at, bytes + at, end - at);
    at = end;
  }
}

void WriteQueue::Finish(const Task& task) {
  Segment& segment = *task.segment;
  task.chunk->written = task.end;
  segment.unsynced = true;  // also when a sync has begun meanwhile
  segment.file_bytes = std::max(segment.file_bytes, task.chunk->offset + task.end);
  queued_bytes_ -= task.end - task.begin;
  written_bytes_ += task.end - task.begin;
  ++finished_;
  ReleaseIfDone(task.segment, task.chunk);
}

void WriteQueue::Close(const SegmentPtr& segment, const std::shared_ptr<Chunk>& chunk) {
  chunk->last = true;
  ReleaseIfDone(segment, chunk);
}

void WriteQueue::ReleaseIfDone(const SegmentPtr& segment, const std::shared_ptr<Chunk>& held) {
  const std::shared_ptr<Chunk> chunk = held;  // `held` may be the element that is erased
  if (!chunk->last || chunk->written != chunk->queued) return;
  std::erase(segment->chunks, chunk);
  if (chunk->pooled) {
    if (spare_.size() * Chunk::kBytes < max_queued_bytes_) {
      spare_.push_back(std::move(chunk->buffer));
    } else {
      memory_bytes_ -= chunk->buffer.size();
    }
  }
  written_(segment);
}

}  // namespace tierstore
