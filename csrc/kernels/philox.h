// Philox4x32-10 is the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2,
// 3" (SC'11): four 32-bit outputs are a pure function of a 128-bit counter and a 64-bit key.
#pragma once

#include <cstdint>

#include "kernels/inline.h"

namespace tierstore {

// Sets out[j][i] to word j of counter (c0, c1, first_block + i, c3) under `key`, i < N. The N generators run
// in the lanes of vectors.
template <int N>
TIERSTORE_INLINE void Philox(std::uint32_t c0, std::uint32_t c1, std::uint32_t first_block, std::uint64_t key,
                             std::uint32_t (&out)[4][N], std::uint32_t c3 = 0) {
  constexpr std::uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  for (int i = 0; i < N; ++i) {
    std::uint32_t k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
    std::uint32_t x0 = c0, x1 = c1, x2 = first_block + static_cast<std::uint32_t>(i), x3 = c3;
    for (int round = 0; round < 10; ++round, k0 += kWeyl0, k1 += kWeyl1) {
      const std::uint64_t product0 = static_cast<std::uint64_t>(kMultiplier0) * x0;
      const std::uint64_t product1 = static_cast<std::uint64_t>(kMultiplier1) * x2;
      x0 = static_cast<std::uint32_t>(product1 >> 32) ^ x1 ^ k0;
      x1 = static_cast<std::uint32_t>(product1);
      x2 = static_cast<std::uint32_t>(product0 >> 32) ^ x3 ^ k1;
      x3 = static_cast<std::uint32_t>(product0);
    }
    out[0][i] = x0, out[1][i] = x1, out[2][i] = x2, out[3][i] = x3;
  }
}

}  // namespace tierstore
