// Records ("rows") in a memory tier, addressed by slot, and whole-row copies.
#pragma once

#include <cstdint>

namespace tierstore {

// Rows of `row_bytes` bytes (a multiple of 16) from `base`: embedding_dim float32 weights, the optimizer's
// float32 state, zero padding. Does not own the memory.
struct Rows {
  std::uint8_t* base;
  std::int64_t row_bytes;

  float* At(std::int32_t slot) const { return reinterpret_cast<float*>(base + slot * row_bytes); }
};

// to[i] = rows[slots[i]]; `to` is contiguous, n * row_bytes bytes, and does not overlap the rows.
void CopyOut(Rows rows, const std::int32_t* slots, std::int64_t n, std::uint8_t* to);
// rows[slots[i]] = from[source ? source[i] : i]; slots must not repeat.
void CopyIn(Rows rows, const std::int32_t* slots, const std::int32_t* source, std::int64_t n,
            const std::uint8_t* from);
// rows[to[i]] = rows[from[i]]; no slot occurs twice.
void MoveRows(Rows rows, const std::int32_t* from, const std::int32_t* to, std::int64_t n);

}  // namespace tierstore
