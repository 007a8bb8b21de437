#include "cache/sort_keys.h"

#include <algorithm>

#include "common/thread_pool.h"

namespace tierstore {
namespace {

constexpr std::int64_t kPiece = std::int64_t{1} << 15;

struct Piece {
  std::size_t segment;
  std::int64_t begin, end;
  std::uint32_t* keys;
  BadId bad = {};
};

template <typename Id>
BadId FirstBad(const IdSegment& segment, const Piece& piece) {
  const Id* const ids = static_cast<const Id*>(segment.ids);
  for (std::int64_t i = piece.begin; i < piece.end; ++i) {
    const auto id = static_cast<std::int64_t>(ids[i]);
    if (id < 0 || id >= segment.bound) return {static_cast<std::int64_t>(piece.segment), i, id};
  }
  return {};
}

// The loop has no branch, so that it takes vectors of ids.
template <typename Id>
void WriteKeys(const IdSegment& segment, std::uint32_t base, std::uint32_t skipped, Piece* piece) {
  const Id* const ids = static_cast<const Id*>(segment.ids) + piece->begin;
  const auto bound = static_cast<std::uint64_t>(segment.bound);
  const std::int64_t count = piece->end - piece->begin, padding = segment.padding;
  std::uint32_t* const keys = piece->keys;
  std::uint64_t wrong = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto id = static_cast<std::int64_t>(ids[i]);
    wrong |= static_cast<std::uint64_t>(static_cast<std::uint64_t>(id) >= bound);
    const auto key = base + static_cast<std::uint32_t>(id);
    keys[i] = id == padding ? skipped : key;
  }
  if (wrong != 0) piece->bad = FirstBad<Id>(segment, *piece);
}

}  // namespace

BadId WriteSortKeys(const std::vector<IdSegment>& segments, const std::vector<std::uint32_t>& bases,
                    std::uint32_t skipped, std::uint32_t* keys) {
  std::vector<Piece> pieces;
  for (std::size_t s = 0; s < segments.size(); ++s) {
    for (std::int64_t begin = 0; begin < segments[s].count; begin += kPiece)
      pieces.push_back({s, begin, std::min(begin + kPiece, segments[s].count), keys + begin});
    keys += segments[s].count;
  }
  ParallelFor(0, static_cast<std::int64_t>(pieces.size()), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t p = first; p < last; ++p) {
      Piece& piece = pieces[static_cast<std::size_t>(p)];
      const IdSegment& segment = segments[piece.segment];
      if (segment.is_int32) {
        WriteKeys<std::int32_t>(segment, bases[piece.segment], skipped, &piece);
      } else {
        WriteKeys<std::int64_t>(segment, bases[piece.segment], skipped, &piece);
      }
    }
  });
  for (const Piece& piece : pieces) {
    if (piece.bad.segment >= 0) return piece.bad;
  }
  return {};
}

}  // namespace tierstore
