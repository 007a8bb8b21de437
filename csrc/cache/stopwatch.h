// Measures the time in hooks of policies.
#pragma once

#include <chrono>

namespace tierstore {

// Adds the seconds of its life to a counter.
class Stopwatch {
 public:
  explicit Stopwatch(double* seconds) : seconds_(seconds), begin_(Clock::now()) {}
  ~Stopwatch() { *seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double* seconds_;
  Clock::time_point begin_;
};

}  // namespace tierstore
