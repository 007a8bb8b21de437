// Reads and sets the floating-point mode of a thread: rounding, and the treatment of denormal numbers. Each
// thread has a mode of its own (torch.set_flush_denormal changes the mode of the calling thread), so a loop
// that several threads share must carry the mode along, or results would differ by thread.
#pragma once

#include <cstdint>

namespace tierstore {

using FloatMode = std::uint64_t;

// Returns the mode of the calling thread, without the flags of past exceptions.
FloatMode CurrentFloatMode();
// Returns the mode in which every thread begins: denormal numbers are kept.
FloatMode DefaultFloatMode();

// Sets the mode of the calling thread while this object lives.
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
