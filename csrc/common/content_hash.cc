#include "common/content_hash.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <vector>

#include "common/thread_pool.h"

namespace tierstore {
namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F,
                        kPrime3 = 0x165667B19E3779F9, kPrime4 = 0x85EBCA77C2B2AE63,
                        kPrime5 = 0x27D4EB2F165667C5;

template <typename Word>
std::uint64_t Load(const unsigned char* from) {
  Word word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

std::uint64_t Round(std::uint64_t lane, std::uint64_t word) {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

}  // namespace

namespace {

std::uint64_t HashOfPiece(const void* data, std::size_t size) {
  const auto* at = static_cast<const unsigned char*>(data);
  const unsigned char* const end = at + size;
  std::uint64_t hash = kPrime5;
  if (size >= 32) {
    std::array<std::uint64_t, 4> lane{kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1};
    for (; end - at >= 32; at += 32) {
      for (std::size_t i = 0; i < 4; ++i) lane[i] = Round(lane[i], Load<std::uint64_t>(at + 8 * i));
    }
    hash = std::rotl(lane[0], 1) + std::rotl(lane[1], 7) + std::rotl(lane[2], 12) + std::rotl(lane[3], 18);
    for (const std::uint64_t value : lane) hash = (hash ^ Round(0, value)) * kPrime1 + kPrime4;
  }
  hash += size;
  for (; end - at >= 8; at += 8)
    hash = std::rotl(hash ^ Round(0, Load<std::uint64_t>(at)), 27) * kPrime1 + kPrime4;
  for (; end - at >= 4; at += 4)
    hash = std::rotl(hash ^ Load<std::uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
  for (; at < end; ++at) hash = std::rotl(hash ^ *at * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

}  // namespace

std::uint64_t ContentHash(const void* data, std::size_t size) {
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  if (size <= kPiece) return HashOfPiece(data, size);
  const auto* const bytes = static_cast<const unsigned char*>(data);
  std::vector<std::uint64_t> hashes((size + kPiece - 1) / kPiece);
  ParallelFor(0, static_cast<std::int64_t>(hashes.size()), 1, [&](std::int64_t first, std::int64_t last) {
    for (auto i = static_cast<std::size_t>(first); i < static_cast<std::size_t>(last); ++i)
      hashes[i] = HashOfPiece(bytes + i * kPiece, std::min(kPiece, size - i * kPiece));
  });
  return HashOfPiece(hashes.data(), hashes.size() * sizeof(hashes[0]));
}

}  // namespace tierstore
