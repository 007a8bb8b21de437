// Waits for a moment without sleeping. To be woken, a sleeping thread needs a system call of another thread
// and some 10 to 50 microseconds, so a thread that is about to get work should not fall asleep.
#pragma once

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tierstore {

// How long a thread spins before it sleeps: about what sleeping and being woken would take.
inline constexpr std::chrono::microseconds kSpinTime{50};

// Tells the processor that this thread spins.
inline void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // `yield` takes no time on most cores
#endif
}

// Spins until `condition` is true or kSpinTime has passed, and returns whether it is true. The condition must
// be cheap and must take no lock.
template <typename Condition>
bool SpinUntil(const Condition& condition) {
  constexpr int kTriesPerLookAtClock = 16;
  const auto until = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kTriesPerLookAtClock; ++i) {
      if (condition()) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < until);
  return condition();
}

}  // namespace tierstore
