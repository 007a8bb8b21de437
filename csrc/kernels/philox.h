// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
// (SC'11): four 32-bit outputs as a pure function of a 128-bit counter and a 64-bit key.
#pragma once

#include <cstdint>

#include "kernels/isa.h"

namespace tierstore {

// Outputs of N counters (c0, c1, first_block + i, 0), i < N, under `key`; out[j][i] is word j of counter i.
// In this order the N generators run in the lanes of a vector.
template <int N>
TIERSTORE_INLINE void Philox(std::uint32_t c0, std::uint32_t c1, std::uint32_t first_block, std::uint64_t key,
                             std::uint32_t (&out)[4][N]) {
  constexpr std::uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  for (int i = 0; i < N; ++i) {
    out[0][i] = c0;
    out[1][i] = c1;
    out[2][i] = first_block + static_cast<std::uint32_t>(i);
    out[3][i] = 0;
  }
  std::uint32_t k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round, k0 += kWeyl0, k1 += kWeyl1) {
    for (int i = 0; i < N; ++i) {
      const std::uint64_t product0 = kMultiplier0 * out[0][i];
      const std::uint64_t product1 = kMultiplier1 * out[2][i];
      out[0][i] = static_cast<std::uint32_t>(product1 >> 32) ^ out[1][i] ^ k0;
      out[1][i] = static_cast<std::uint32_t>(product1);
      out[2][i] = static_cast<std::uint32_t>(product0 >> 32) ^ out[3][i] ^ k1;
      out[3][i] = static_cast<std::uint32_t>(product0);
    }
  }
}

}  // namespace tierstore
