// Encodes and decodes footers of segments. docs/reference/formats.md specifies every byte.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "io/env.h"
#include "store/coding.h"
#include "store/format.h"

namespace tierstore {

// Footers have a version of their own, since a segment can be read without its footer: footers of version 2
// are read, too.
inline constexpr std::uint32_t kFooterVersion = 3;
inline constexpr std::uint32_t kOldestFooterVersion = 2;
inline constexpr std::size_t kTrailerBytes = 64;

// A Footer ends a full segment. It has the key (and in relocated segments the epoch) of every slot, so that
// the index is rebuilt without reading the rows.
struct Footer {
  std::vector<std::uint64_t> keys;
  std::vector<std::uint32_t> epochs;  // empty unless the segment is relocated
  std::vector<std::uint32_t> voids;   // ascending slots

  // Returns the number of bytes that Encode gives.
  std::uint64_t EncodedBytes(const SegmentHeader& header) const;
  // Returns the bytes from geometry.EndOffset(slots) to the end of the file.
  Bytes Encode(const SegmentHeader& header, std::uint32_t version = kFooterVersion) const;
  // Returns nothing when the file has no valid footer, whether it is damaged or missing.
  static std::optional<Footer> Load(File& file, const SegmentHeader& header,
                                    std::uint32_t* version = nullptr);

  // Return the most bits of a slot, and the most bytes of a whole footer, whatever its keys, epochs and voids
  // are.
  static unsigned MostBits(bool relocated);
  static std::uint64_t MostBytes(std::uint64_t slots, bool relocated);
};

}  // namespace tierstore
