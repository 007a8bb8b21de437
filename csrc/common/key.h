// Packs and hashes a row's key, which has the table in the upper 16 bits and the id in the lower 48 bits.
#pragma once

#include <cstdint>

namespace tierstore {

inline constexpr int kIdBits = 48;
inline constexpr std::uint64_t kIdMask = (std::uint64_t{1} << kIdBits) - 1;

inline constexpr std::uint64_t MakeKey(std::uint32_t table, std::uint64_t id) {
  return (std::uint64_t{table} << kIdBits) | id;
}
inline constexpr std::uint32_t KeyTable(std::uint64_t key) {
  return static_cast<std::uint32_t>(key >> kIdBits);
}
inline constexpr std::uint64_t KeyId(std::uint64_t key) { return key & kIdMask; }

// This is the finaliser of MurmurHash3: a bijection of 64 bits that mixes every input bit into every output
// bit.
inline constexpr std::uint64_t MixKey(std::uint64_t key) {
  key ^= key >> 33;
  key *= 0xff51afd7ed558ccdULL;
  key ^= key >> 33;
  key *= 0xc4ceb9fe1a85ec53ULL;
  key ^= key >> 33;
  return key;
}

// The secret of this process keys the hash of hash tables in memory, so that no input can crowd a table. No
// result may depend on the hash.
struct HashSecret {
  std::uint64_t flip, odd_factor;
};
extern const HashSecret kHashSecret;
inline std::uint64_t HashKey(std::uint64_t key) {
  return MixKey((key ^ kHashSecret.flip) * kHashSecret.odd_factor);
}

}  // namespace tierstore
