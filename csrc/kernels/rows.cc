#include "kernels/rows.h"

#include <algorithm>
#include <cstring>

#include "common/thread_pool.h"
#include "kernels/vec.h"

namespace tierstore {
namespace {

constexpr std::int64_t kPieceBytes = 256 << 10;

}  // namespace

void CopyOut(Rows rows, const std::int32_t* slots, std::int64_t n, std::uint8_t* to) {
  const std::int64_t bytes = rows.row_bytes;
  const std::int64_t ahead = PrefetchAhead(bytes);
  ParallelFor(0, n, std::max<std::int64_t>(1, kPieceBytes / bytes),
              [&](std::int64_t begin, std::int64_t end) {
                for (std::int64_t i = begin; i < end; ++i) {
                  if (i + ahead < n) Prefetch<false>(rows.At(slots[i + ahead]), bytes);
                  std::memcpy(to + i * bytes, rows.At(slots[i]), bytes);
                }
              });
}

void CopyIn(Rows rows, const std::int32_t* slots, const std::int32_t* source, std::int64_t n,
            const std::uint8_t* from) {
  const std::int64_t bytes = rows.row_bytes;
  const std::int64_t ahead = PrefetchAhead(bytes);
  ParallelFor(0, n, std::max<std::int64_t>(1, kPieceBytes / bytes),
              [&](std::int64_t begin, std::int64_t end) {
                for (std::int64_t i = begin; i < end; ++i) {
                  if (i + ahead < n) {
                    Prefetch<true>(rows.At(slots[i + ahead]), bytes);
                    if (source != nullptr) Prefetch<false>(from + source[i + ahead] * bytes, bytes);
                  }
                  std::memcpy(rows.At(slots[i]), from + (source != nullptr ? source[i] : i) * bytes, bytes);
                }
              });
}

void CopyRows(Rows to, const std::int32_t* slots, Rows from, const std::int32_t* source, std::int64_t n) {
  const std::int64_t bytes = to.row_bytes;
  const std::int64_t ahead = PrefetchAhead(bytes);
  ParallelFor(0, n, std::max<std::int64_t>(1, kPieceBytes / bytes),
              [&](std::int64_t begin, std::int64_t end) {
                for (std::int64_t i = begin; i < end; ++i) {
                  if (i + ahead < n) {
                    Prefetch<true>(to.At(slots[i + ahead]), bytes);
                    Prefetch<false>(from.At(source[i + ahead]), bytes);
                  }
                  std::memcpy(to.At(slots[i]), from.At(source[i]), bytes);
                }
              });
}

void MoveRows(Rows rows, const std::int32_t* from, const std::int32_t* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) std::memcpy(rows.At(to[i]), rows.At(from[i]), rows.row_bytes);
}

}  // namespace tierstore
