// Streams and events whose operations run when an adversary likes: it respects only the order within a stream
// and events that streams wait for.
#pragma once

#include <deque>
#include <functional>
#include <random>

#include "cuda/tests/happens_before.h"

namespace tierstore::cuda::fake {

// kEager: at once; kLazy: when the host waits for it; kRandom: some now, some later; kStarve: one stream is
// lazy, the others are eager.
enum class Order : int { kEager = 0, kLazy = 1, kRandom = 2, kStarve = 3 };

struct Stream;

// What a record of an event marks: all that its stream was given before.
struct Marker {
  Stream* stream;
  Clock clock;
  bool done = false;
};
using MarkerPtr = std::shared_ptr<Marker>;

struct Operation {
  enum Kind { kRun, kRecord, kWait } kind;
  std::function<void(const Actor&)> run;
  Actor actor;
  MarkerPtr marker;
};

struct Stream {
  std::size_t number;
  Clock clock{};
  std::deque<Operation> queue;
  bool capturing = false;

  bool ready() const {
    return !queue.empty() && (queue.front().kind != Operation::kWait || queue.front().marker->done);
  }
};

class Streams {
 public:
  void SetOrder(Order order, unsigned seed, std::size_t starved) {
    order_ = order, starved_ = starved;
    random_.seed(seed);
  }

  // Null where there are too many.
  Stream* Create() {
    std::size_t number = 1;
    while (number < kDefault && streams_.count(number) != 0) ++number;
    return number == kDefault ? nullptr : Make(number);
  }
  void Destroy(Stream* stream) {
    Drain(stream);
    ends_[stream->number] = {};
    ends_[stream->number][stream->number] = stream->clock[stream->number];
    streams_.erase(stream->number);
  }
  // Stream 0 of the driver, which is there without being made. It has the last number, so that the streams of
  // a test have the same numbers whether another test has used it or not.
  Stream* Default() {
    if (default_ == nullptr) default_ = Make(kDefault);
    return default_;
  }
  std::size_t size() const { return streams_.size() - (default_ != nullptr); }

  void Launch(Stream* stream, std::string what, std::function<void(const Actor&)> run) {
    Join(&stream->clock, host_);
    ++stream->clock[stream->number];
    stream->queue.push_back(
        {Operation::kRun, std::move(run), {stream->number, stream->clock, std::move(what)}, nullptr});
    Go();
  }
  MarkerPtr Record(Stream* stream) {
    Join(&stream->clock, host_);
    auto marker = std::make_shared<Marker>(Marker{stream, stream->clock});
    stream->queue.push_back({Operation::kRecord, {}, {}, marker});
    Go();
    return marker;
  }
  void Wait(Stream* stream, const MarkerPtr& marker) {
    Join(&stream->clock, marker->clock);
    stream->queue.push_back({Operation::kWait, {}, {}, marker});
    Go();
  }
  // The host has waited for the marker, or has seen that it is done. Returns whether it was not done before.
  bool Synchronize(const MarkerPtr& marker) {
    const bool waited = !marker->done;
    Force(*marker);
    Join(&host_, marker->clock);
    return waited;
  }
  // Runs all of a stream without the host's knowing it.
  void Drain(Stream* stream) {
    const MarkerPtr marker = std::make_shared<Marker>(Marker{stream, stream->clock});
    stream->queue.push_back({Operation::kRecord, {}, {}, marker});
    Force(*marker);
  }
  Actor Host(std::string what) {
    ++host_[kHost];
    return {kHost, host_, std::move(what)};
  }
  bool idle() const {
    return std::all_of(streams_.begin(), streams_.end(),
                       [](const auto& one) { return one.second->queue.empty(); });
  }
  std::mt19937* random() { return &random_; }

 private:
  static constexpr std::size_t kDefault = kMostActors - 1;

  Stream* Make(std::size_t number) {
    auto made = std::make_unique<Stream>();
    made->number = number;
    made->clock = ends_[number];  // it does not come after what the last stream of this number did not
    Stream* const stream = made.get();
    streams_[number] = std::move(made);
    return stream;
  }

  void Step(Stream* stream) {
    const Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    if (operation.kind == Operation::kRun) operation.run(operation.actor);
    if (operation.kind == Operation::kRecord) operation.marker->done = true;
  }
  // Runs no more than what the marker needs.
  void Force(const Marker& marker) {
    while (!marker.done) {
      const Operation& next = marker.stream->queue.front();
      if (next.kind == Operation::kWait && !next.marker->done) Force(*next.marker);
      Step(marker.stream);
    }
  }
  void Go() {
    int turns = order_ == Order::kLazy ? 0 : INT32_MAX;
    if (order_ == Order::kRandom) turns = std::array{0, 0, 1, 3, 9}[(*random())() % 5];
    for (; turns > 0; --turns) {
      std::vector<Stream*> ready;
      for (const auto& [number, stream] : streams_) {
        const bool starves = order_ == Order::kStarve && number == starved_;
        if (stream->ready() && !starves) ready.push_back(stream.get());
      }
      if (ready.empty()) return;
      Step(ready[random_() % ready.size()]);
    }
  }

  std::map<std::size_t, std::unique_ptr<Stream>> streams_;
  Stream* default_ = nullptr;
  std::array<Clock, kMostActors> ends_{};
  Clock host_{};
  Order order_ = Order::kEager;
  std::size_t starved_ = 0;
  std::mt19937 random_;
};

}  // namespace tierstore::cuda::fake
