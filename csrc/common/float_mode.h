// The floating-point mode of a thread: what happens to denormal numbers, and rounding. It belongs to the
// thread (torch.set_flush_denormal changes the calling one's), so a loop that is shared among threads must
// carry it along, or results would differ by thread.
#pragma once

#include <cstdint>

namespace tierstore {

using FloatMode = std::uint64_t;

// Of the calling thread; the flags of what has happened so far are no part of it.
FloatMode CurrentFloatMode();
// What every thread begins with: denormal numbers are kept.
FloatMode DefaultFloatMode();

// The calling thread works in `mode` as long as this lives.
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
