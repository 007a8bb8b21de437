// Computes CRC-32C (Castagnoli polynomial, reflected, as in RFC 3720) by the instruction of processors that
// have one, else by tables.
//
// The functions work on the raw register, so that a checksum can be continued and prefixes can be shared:
// start with kCrc32cInit, extend as often as needed, finish with Crc32cFinish.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore {

inline constexpr std::uint32_t kCrc32cInit = 0xffffffffu;
inline constexpr std::uint32_t Crc32cFinish(std::uint32_t state) { return ~state; }

std::uint32_t Crc32cExtend(std::uint32_t state, const void* data, std::size_t size);

// Extends four checksums, each by a buffer of its own, which hides the latency of the instruction. All
// buffers have `size` bytes.
void Crc32cExtend4(std::uint32_t state[4], const void* const data[4], std::size_t size);

inline std::uint32_t Crc32c(const void* data, std::size_t size) {
  return Crc32cFinish(Crc32cExtend(kCrc32cInit, data, size));
}

// Returns "sse4.2", "armv8-crc" or "table".
const char* Crc32cImplementation();

// Uses tables on any processor. Tests call it.
std::uint32_t Crc32cExtendByTable(std::uint32_t state, const void* data, std::size_t size);

}  // namespace tierstore
