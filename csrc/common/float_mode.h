// The floating-point mode of a thread: rounding, and the treatment of denormal numbers. It belongs to the
// thread (torch.set_flush_denormal changes the calling thread's), so a loop that several threads share must
// carry it along, or results would differ by thread.
#pragma once

#include <cstdint>

namespace tierstore {

using FloatMode = std::uint64_t;

// The mode of the calling thread, without the flags of past exceptions.
FloatMode CurrentFloatMode();
// The mode in which every thread begins: denormal numbers are kept.
FloatMode DefaultFloatMode();

// The calling thread works in `mode` while this object lives.
class ScopedFloatMode {
 public:
  explicit ScopedFloatMode(FloatMode mode);
  ~ScopedFloatMode();
  ScopedFloatMode(const ScopedFloatMode&) = delete;
  ScopedFloatMode& operator=(const ScopedFloatMode&) = delete;

 private:
  FloatMode before_;
};

}  // namespace tierstore
