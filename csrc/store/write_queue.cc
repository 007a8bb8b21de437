#include "store/write_queue.h"

#include <algorithm>

#include "store/errors.h"

namespace tierstore {

namespace {
constexpr std::size_t kMaxSpare = 4;
}

WriteQueue::WriteQueue(std::mutex& mutex, std::size_t max_queued_bytes,
                       std::function<void(const SegmentPtr&)> written)
    : mutex_(mutex), max_queued_bytes_(max_queued_bytes), written_(std::move(written)) {
  thread_ = std::thread([this] { Run(); });
}

WriteQueue::~WriteQueue() {
  Lock lock(mutex_);
  Stop(lock);
}

std::shared_ptr<Chunk> WriteQueue::NewChunk(Lock& lock, std::uint64_t offset, bool background) {
  progress_.wait(lock, [this] { return stop_ || error_ != nullptr || queued_bytes_ < max_queued_bytes_; });
  if (background && (stop_ || error_ != nullptr)) throw Interrupted{};
  ThrowPending();
  auto chunk = std::make_shared<Chunk>();
  chunk->offset = offset;
  chunk->pooled = true;
  if (spare_.empty()) {
    chunk->buffer = AlignedBuffer(Chunk::kBytes);
    memory_bytes_ += Chunk::kBytes;
  } else {
    chunk->buffer = std::move(spare_.back());
    spare_.pop_back();
  }
  return chunk;
}

void WriteQueue::Enqueue(const SegmentPtr& segment, const std::shared_ptr<Chunk>& chunk, std::size_t end) {
  tasks_.push_back(Task{segment, chunk, chunk->queued, end});
  queued_bytes_ += end - chunk->queued;
  chunk->queued = end;
  segment->unsynced = true;
  ++enqueued_;
  work_.notify_one();
}

void WriteQueue::Drain(Lock& lock) {
  const std::uint64_t ticket = enqueued_;
  progress_.wait(lock, [&] { return stop_ || error_ != nullptr || finished_ >= ticket; });
  ThrowPending();
}

void WriteQueue::ThrowPending() {
  if (stop_) throw ClosedError("the store is closed");
  if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  if (paused_) {
    paused_ = false;
    work_.notify_one();
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
  if (!thread_.joinable()) return;
  std::thread thread = std::move(thread_);
  lock.unlock();
  thread.join();
  lock.lock();
  tasks_.clear();
}

void WriteQueue::Run() {
  Lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return stop_ || (!tasks_.empty() && !paused_); });
    if (stop_) return;
    const Task task = tasks_.front();
    std::exception_ptr error;
    lock.unlock();
    try {
      task.segment->file->Write(task.chunk->offset + task.begin, task.chunk->buffer.data() + task.begin,
                                task.end - task.begin);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error != nullptr) {
      paused_ = true;
      Report(error);
    } else {
      tasks_.pop_front();
      Finish(task);
    }
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
  progress_.notify_all();
}

void WriteQueue::Close(const SegmentPtr& segment, const std::shared_ptr<Chunk>& chunk) {
  chunk->last = true;
  ReleaseIfDone(segment, chunk);
}

void WriteQueue::ReleaseIfDone(const SegmentPtr& segment, const std::shared_ptr<Chunk>& held) {
  const std::shared_ptr<Chunk> chunk = held;  // `held` may be what is erased
  if (!chunk->last || chunk->written != chunk->queued) return;
  std::erase(segment->chunks, chunk);
  if (chunk->pooled) {
    if (spare_.size() < kMaxSpare) {
      spare_.push_back(std::move(chunk->buffer));
    } else {
      memory_bytes_ -= Chunk::kBytes;
    }
  }
  written_(segment);
}

}  // namespace tierstore
