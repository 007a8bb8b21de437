#include "common/float_mode.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tierstore {
namespace {

#if defined(__x86_64__)
constexpr FloatMode kDefault = 0x1f80, kFlags = 0x3f;
FloatMode Get() { return _mm_getcsr(); }
void Set(FloatMode mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
constexpr FloatMode kDefault = 0, kFlags = 0;
FloatMode Get() {
  FloatMode mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void Set(FloatMode mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
constexpr FloatMode kDefault = 0, kFlags = 0;
FloatMode Get() { return 0; }
void Set(FloatMode) {}
#endif

}  // namespace

FloatMode CurrentFloatMode() { return Get() & ~kFlags; }
FloatMode DefaultFloatMode() { return kDefault; }

ScopedFloatMode::ScopedFloatMode(FloatMode mode) : before_(CurrentFloatMode()) {
  if (mode != before_) Set(mode);
}

ScopedFloatMode::~ScopedFloatMode() {
  if (CurrentFloatMode() != before_) Set(before_);
}

}  // namespace tierstore
