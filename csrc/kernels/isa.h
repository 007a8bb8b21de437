// Chooses the instruction set at run time. A kernel is a struct with a nested `Args` and
//
//   template <int W> TIERSTORE_INLINE static void Run(const Args&, int64_t begin, int64_t end);
//
// whose whole body is inlined into one function per instruction set; W is the number of float lanes of its
// vectors. A kernel's results must not depend on W.
#pragma once

#include <cstdint>

#include "common/thread_pool.h"
#include "kernels/inline.h"

#if defined(__x86_64__)
#define TIERSTORE_X86 1
#else
#define TIERSTORE_X86 0
#endif

namespace tierstore {

enum class Isa : int { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

// Returns the best instruction set of this CPU, unless a lower instruction set was forced.
Isa ActiveIsa();
Isa BestIsa();
// Forces an instruction set, for tests. Throws std::invalid_argument when the CPU lacks the instruction set.
void ForceIsa(Isa isa);

template <typename Kernel>
void RunBaseline(const typename Kernel::Args& args, std::int64_t begin, std::int64_t end) {
  Kernel::template Run<4>(args, begin, end);
}

#if TIERSTORE_X86
template <typename Kernel>
__attribute__((target("avx2"))) void RunAvx2(const typename Kernel::Args& args, std::int64_t begin,
                                             std::int64_t end) {
  Kernel::template Run<8>(args, begin, end);
}

template <typename Kernel>
__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512"))) void RunAvx512(
    const typename Kernel::Args& args, std::int64_t begin, std::int64_t end) {
  Kernel::template Run<16>(args, begin, end);
}
#endif

// Runs the kernel over [begin, end) in pieces of `grain`, on all threads.
template <typename Kernel>
void RunKernel(const typename Kernel::Args& args, std::int64_t begin, std::int64_t end, std::int64_t grain) {
  auto* run = &RunBaseline<Kernel>;
#if TIERSTORE_X86
  if (ActiveIsa() == Isa::kAvx2) run = &RunAvx2<Kernel>;
  if (ActiveIsa() == Isa::kAvx512) run = &RunAvx512<Kernel>;
#endif
  ParallelFor(begin, end, grain, [&](std::int64_t b, std::int64_t e) { run(args, b, e); });
}

}  // namespace tierstore
