// Describes rows in a memory tier, which slots address, and copies whole rows.
#pragma once

#include <cstdint>

namespace tierstore {

// A row holds weights in one of these types. kInt8 occurs in encoded rows only (kernels/row_format.h).
enum class WeightType : std::uint8_t { kFloat32 = 0, kBfloat16 = 1, kHalf = 2, kInt8 = 3 };

constexpr std::int64_t WeightBytes(WeightType type) {
  constexpr std::int64_t kBytes[] = {4, 2, 2, 1};
  return kBytes[static_cast<int>(type)];
}

// Returns where the state (float32) of a row of `dim` weights begins: at a multiple of 4 bytes.
constexpr std::int64_t StateBegin(WeightType type, std::int64_t dim) {
  return (WeightBytes(type) * dim + 3) / 4 * 4;
}

// The rows lie one after the other from `base` on, and each has `row_bytes` bytes (a multiple of 16):
// embedding_dim weights, zeros up to a multiple of 4 bytes, the optimizer's float32 state, zero padding. Rows
// does not own the memory.
struct Rows {
  std::uint8_t* base;
  std::int64_t row_bytes;
  WeightType weights = WeightType::kFloat32;

  std::uint8_t* At(std::int64_t slot) const { return base + slot * row_bytes; }
};

// Sets to[i] = rows[slots[i]]; `to` is contiguous, n * row_bytes bytes, and does not overlap the rows.
void CopyOut(Rows rows, const std::int32_t* slots, std::int64_t n, std::uint8_t* to);
// Sets rows[slots[i]] = from[source ? source[i] : i]; slots must not repeat.
void CopyIn(Rows rows, const std::int32_t* slots, const std::int32_t* source, std::int64_t n,
            const std::uint8_t* from);
// Sets rows[to[i]] = rows[from[i]]; no slot occurs twice.
void MoveRows(Rows rows, const std::int32_t* from, const std::int32_t* to, std::int64_t n);
// Sets to[slots[i]] = from[source[i]]. `to` and `from` have rows of the same size and do not overlap; slots
// must not repeat.
void CopyRows(Rows to, const std::int32_t* slots, Rows from, const std::int32_t* source, std::int64_t n);

}  // namespace tierstore
