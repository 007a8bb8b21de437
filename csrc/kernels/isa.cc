#include "kernels/isa.h"

#include <atomic>
#include <stdexcept>

namespace tierstore {
namespace {

Isa Detect() {
#if TIERSTORE_X86
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("f16c")) return Isa::kBaseline;  // every processor with AVX2 has f16c
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2")) return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

std::atomic<Isa>& Active() {
  static std::atomic<Isa> isa{BestIsa()};
  return isa;
}

}  // namespace

Isa BestIsa() {
  static const Isa best = Detect();
  return best;
}

Isa ActiveIsa() { return Active().load(std::memory_order_relaxed); }

void ForceIsa(Isa isa) {
  if (isa > BestIsa()) throw std::invalid_argument("this CPU does not have that instruction set");
  Active().store(isa);
}

}  // namespace tierstore
