#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "common/call_limit.h"
#include "io/auto_reader.h"
#include "io/errors.h"
#include "io/posix_env.h"
#include "io/read_slots.h"
#include "io/request_queues.h"
#include "io/uring.h"

namespace tierstore {
namespace {

// This many completions are waited for, and worked on before further requests are submitted. Waiting for
// several completions saves system calls; with more of them the device would run out of requests meanwhile.
constexpr unsigned kAtOnce = 8;

class UringReader final : public BatchReader {
 public:
  UringReader(std::unique_ptr<Uring> ring, unsigned depth, unsigned devices)
      : slots_(depth, devices),
        queues_(devices),
        descriptors_(std::size_t{depth} * devices),
        last_(devices),
        ring_(std::move(ring)) {
    fixed_ = ring_->RegisterBuffer(slots_.arena().data(), slots_.arena().size());
  }

  void Read(std::span<const ReadRequest> requests, const Done& done) override {
    if (broken_ != 0) throw RingError(broken_);
    requests_ = requests;
    slots_.Prepare(requests);
    queues_.Prepare(requests, slots_.count());
    error_ = nullptr;
    in_flight_ = 0;
    while (true) {
      while (error_ == nullptr && slots_.HasFree()) {
        const auto next = queues_.Next();
        if (!next || !Begin(*next)) break;
      }
      if (in_flight_ == 0) break;
      const int code = ring_->SubmitAndWait(std::min(in_flight_, kAtOnce));
      if (code != 0) {
        broken_ = code;  // requests in flight cannot be awaited; their memory lives as long as the ring
        throw RingError(code);
      }
      UringCqe cqe;
      for (unsigned n = 0; n < kAtOnce && ring_->Reap(cqe); ++n) Complete(cqe, done);
      if (error_ == nullptr && CallMustEnd()) error_ = std::make_exception_ptr(CallEnded{});
    }
    std::fill(last_.begin(), last_.end(), Last{});
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  const char* name() const override { return "uring"; }

 private:
  static PosixFile& FileOf(const ReadRequest& request) { return static_cast<PosixFile&>(*request.file); }

  // Returns false when the request must wait for descriptors in use, or has failed.
  bool Begin(std::size_t index) try {
    PosixFile& file = FileOf(requests_[index]);
    Last& last = last_[requests_[index].device];
    if (&file != last.file) {
      std::fill(last_.begin(), last_.end(), Last{});  // one may be the descriptor that is lacking
      PosixFile::Descriptor descriptor = file.Use(in_flight_ > 0);
      if (descriptor == nullptr) return false;
      last = {&file, std::move(descriptor)};
    }
    queues_.Begin();
    const unsigned slot = slots_.Take(index);
    descriptors_[slot] = last.descriptor;
    Submit(slot);
    return true;
  } catch (const IoError& error) {
    if (!error.IsOutOfDescriptors() || in_flight_ == 0) error_ = std::current_exception();
    return false;
  }

  void Submit(unsigned slot) {
    const ReadRequest& request = requests_[slots_[slot].request];
    const std::size_t got = slots_[slot].got;
    UringSqe& sqe = ring_->NextSqe();
    sqe.opcode = fixed_ ? kUringReadFixed : kUringRead;
    sqe.fd = descriptors_[slot]->value();
    sqe.offset = request.offset + got;
    sqe.address = reinterpret_cast<std::uint64_t>(slots_.data(slot) + got);
    sqe.length = static_cast<std::uint32_t>(request.size - got);
    sqe.user_data = slot;
    ++in_flight_;
  }

  void Complete(const UringCqe& cqe, const Done& done) {
    const auto slot = static_cast<unsigned>(cqe.user_data);
    const std::size_t index = slots_[slot].request;
    const ReadRequest& request = requests_[index];
    --in_flight_;
    if (cqe.result == -EINTR || cqe.result == -EAGAIN) return Submit(slot);
    if (cqe.result == -EINVAL && !std::exchange(slots_[slot].refused_once, true) &&
        FileOf(request).GiveUpDirect(descriptors_[slot])) {
      return Submit(slot);
    }
    if (cqe.result > 0) slots_[slot].got += static_cast<std::size_t>(cqe.result);
    if (cqe.result > 0 && slots_[slot].got < request.size) return Submit(slot);
    if (error_ == nullptr) {
      try {
        if (cqe.result < 0) {
          throw IoError(
              -cqe.result, request.file->path(),
              "read " + std::to_string(request.size) + " bytes at offset " + std::to_string(request.offset));
        }
        done(index, slots_.data(slot), slots_[slot].got);
      } catch (...) {
        error_ = std::current_exception();
      }
    }
    descriptors_[slot].reset();
    queues_.End(request);
    slots_.Release(slot);
  }

  // The file of a device's last request, which often is the file of the device's next request, too.
  struct Last {
    PosixFile* file = nullptr;
    PosixFile::Descriptor descriptor;
  };

  ReadSlots slots_;
  RequestQueues queues_;
  std::vector<PosixFile::Descriptor> descriptors_;  // by slot, of the requests in flight
  std::vector<Last> last_;                          // by device
  std::unique_ptr<Uring> ring_;                     // dies before the memory that it may still write to
  bool fixed_ = false;
  int broken_ = 0;
  std::span<const ReadRequest> requests_;
  std::exception_ptr error_;
  unsigned in_flight_ = 0;
};

}  // namespace

std::unique_ptr<BatchReader> NewUringReader(unsigned queue_depth, unsigned devices, int* error) {
  auto ring = Uring::Create(queue_depth * devices, error);
  if (ring == nullptr) return nullptr;
  return std::make_unique<UringReader>(std::move(ring), queue_depth, devices);
}

}  // namespace tierstore
