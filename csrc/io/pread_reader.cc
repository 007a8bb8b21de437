// Reads batches on kernels and in containers without io_uring: each thread has one read in flight.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "common/call_limit.h"
#include "io/errors.h"
#include "io/read_slots.h"
#include "io/request_queues.h"

namespace tierstore {
namespace {

class PreadReader final : public BatchReader {
 public:
  PreadReader(unsigned threads, unsigned devices)
      : threads_(threads * devices), slots_(threads, devices), held_(threads_), queues_(devices) {}

  ~PreadReader() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void Read(std::span<const ReadRequest> requests, const Done& done) override {
    StartWorkers();
    slots_.Prepare(requests);
    queues_.Prepare(requests, slots_.count());
    std::exception_ptr error;
    std::size_t in_flight = 0;
    std::deque<Job> arrived;
    while (true) {
      if (error == nullptr && CallMustEnd()) error = std::make_exception_ptr(CallEnded{});
      {
        std::unique_lock lock(mutex_);
        for (; error == nullptr && slots_.HasFree(); ++in_flight) {
          const auto next = queues_.Next();
          if (!next) break;
          std::shared_ptr<const void> file;
          try {
            file = requests[*next].file->Hold(in_flight > 0);
          } catch (const IoError& refused) {
            if (!refused.IsOutOfDescriptors() || in_flight == 0) error = std::current_exception();
          }
          if (file == nullptr) break;  // requests in flight will release descriptors
          queues_.Begin();
          const unsigned slot = slots_.Take(*next);
          held_[slot] = std::move(file);  // stays open until the thread has read it
          queued_.push_back(Job{slot, &requests[*next], slots_.data(slot), 0, nullptr});
          work_.notify_one();
        }
        if (in_flight == 0) break;
        finished_.wait(lock, [&] { return !done_.empty(); });
        arrived.swap(done_);
      }
      for (const Job& job : arrived) {
        --in_flight;
        if (error == nullptr) error = Deliver(job, slots_[job.slot].request, done);
        held_[job.slot].reset();
        queues_.End(*job.request);
        slots_.Release(job.slot);
      }
      arrived.clear();
    }
    if (error != nullptr) std::rethrow_exception(error);
  }

  const char* name() const override { return "pread"; }

 private:
  struct Job {
    unsigned slot;
    const ReadRequest* request;
    std::byte* data;
    std::size_t got;
    std::exception_ptr error;
  };

  static std::exception_ptr Deliver(const Job& job, std::size_t request, const Done& done) {
    if (job.error != nullptr) return job.error;
    try {
      done(request, job.data, job.got);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  void StartWorkers() {
    while (workers_.size() < threads_) workers_.emplace_back([this] { Work(); });
  }

  void Work() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return stop_ || !queued_.empty(); });
      if (stop_) return;
      Job job = queued_.front();
      queued_.pop_front();
      lock.unlock();
      try {
        job.got = job.request->file->Read(job.request->offset, job.data, job.request->size);
      } catch (...) {
        job.error = std::current_exception();
      }
      lock.lock();
      done_.push_back(job);
      finished_.notify_one();
    }
  }

  const unsigned threads_;
  ReadSlots slots_;
  std::vector<std::shared_ptr<const void>> held_;  // by slot, of the requests in flight
  RequestQueues queues_;
  std::vector<std::thread> workers_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable work_, finished_;
  std::deque<Job> queued_, done_;
  bool stop_ = false;
};

}  // namespace

std::unique_ptr<BatchReader> NewPreadReader(unsigned queue_depth, unsigned devices) {
  return std::make_unique<PreadReader>(std::min(queue_depth, kMostPreadThreads), devices);
}

}  // namespace tierstore
