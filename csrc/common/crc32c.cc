#include "common/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define TIERSTORE_CRC_TARGET __attribute__((target("sse4.2")))
#define TIERSTORE_CRC_U64(crc, word) static_cast<std::uint32_t>(_mm_crc32_u64(crc, word))
#define TIERSTORE_CRC_U8(crc, byte) _mm_crc32_u8(crc, byte)
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define TIERSTORE_CRC_TARGET __attribute__((target("+crc")))
#define TIERSTORE_CRC_U64(crc, word) __crc32cd(crc, word)
#define TIERSTORE_CRC_U8(crc, byte) __crc32cb(crc, byte)
#endif

namespace tierstore {
namespace {

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][b] is the register after byte b and k more zero bytes.
constexpr Tables MakeTables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0u);
    tables[0][byte] = crc;
  }
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    for (int k = 1; k < 8; ++k) {
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = MakeTables();

std::uint64_t LoadWord(const unsigned char* p) {
  std::uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

void Extend4ByTable(std::uint32_t state[4], const void* const data[4], std::size_t size) {
  for (int i = 0; i < 4; ++i) state[i] = Crc32cExtendByTable(state[i], data[i], size);
}

#ifdef TIERSTORE_CRC_TARGET

TIERSTORE_CRC_TARGET std::uint32_t ExtendByInstruction(std::uint32_t state, const void* data,
                                                       std::size_t size) {
  auto p = static_cast<const unsigned char*>(data);
  for (; size >= 8; size -= 8, p += 8) state = TIERSTORE_CRC_U64(state, LoadWord(p));
  for (; size > 0; --size, ++p) state = TIERSTORE_CRC_U8(state, *p);
  return state;
}

TIERSTORE_CRC_TARGET void Extend4ByInstruction(std::uint32_t state[4], const void* const data[4],
                                               std::size_t size) {
  const unsigned char* p[4];
  for (int i = 0; i < 4; ++i) p[i] = static_cast<const unsigned char*>(data[i]);
  std::uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
  std::size_t at = 0;
  for (; at + 8 <= size; at += 8) {
    a = TIERSTORE_CRC_U64(a, LoadWord(p[0] + at));
    b = TIERSTORE_CRC_U64(b, LoadWord(p[1] + at));
    c = TIERSTORE_CRC_U64(c, LoadWord(p[2] + at));
    d = TIERSTORE_CRC_U64(d, LoadWord(p[3] + at));
  }
  const std::uint32_t words[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) state[i] = ExtendByInstruction(words[i], p[i] + at, size - at);
}

bool HasInstruction() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2");
#else
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}

const bool kHasInstruction = HasInstruction();

#endif

}  // namespace

// This is slicing by eight (Kounavis and Berry, "A systematic approach to building high performance
// software-based CRC generators", 2005). Words are loaded as they lie in memory, since Linux is little endian
// on both processors.
std::uint32_t Crc32cExtendByTable(std::uint32_t state, const void* data, std::size_t size) {
  auto p = static_cast<const unsigned char*>(data);
  for (; size >= 8; size -= 8, p += 8) {
    const std::uint64_t word = LoadWord(p) ^ state;
    state = 0;
    for (int k = 0; k < 8; ++k) state ^= kTables[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; size > 0; --size, ++p) state = (state >> 8) ^ kTables[0][(state ^ *p) & 0xff];
  return state;
}

#ifdef TIERSTORE_CRC_TARGET

std::uint32_t Crc32cExtend(std::uint32_t state, const void* data, std::size_t size) {
  return kHasInstruction ? ExtendByInstruction(state, data, size) : Crc32cExtendByTable(state, data, size);
}

void Crc32cExtend4(std::uint32_t state[4], const void* const data[4], std::size_t size) {
  kHasInstruction ? Extend4ByInstruction(state, data, size) : Extend4ByTable(state, data, size);
}

const char* Crc32cImplementation() {
#if defined(__x86_64__)
  return kHasInstruction ? "sse4.2" : "table";
#else
  return kHasInstruction ? "armv8-crc" : "table";
#endif
}

#else

std::uint32_t Crc32cExtend(std::uint32_t state, const void* data, std::size_t size) {
  return Crc32cExtendByTable(state, data, size);
}

void Crc32cExtend4(std::uint32_t state[4], const void* const data[4], std::size_t size) {
  Extend4ByTable(state, data, size);
}

const char* Crc32cImplementation() { return "table"; }

#endif

}  // namespace tierstore
