// Measures the costs of reads of different sizes on the device of a store. The costs are measured once, by
// reading the store's own segments, and are kept in the file DEVICE beside the segments.
// docs/reference/formats.md specifies the file's bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/env.h"

namespace tierstore {

inline constexpr char kReadCostName[] = "DEVICE";
inline constexpr char kReadCostTemporaryName[] = "DEVICE.tmp";

struct ReadCost {
  static constexpr std::array<std::uint32_t, 3> kSizes = {4 << 10, 16 << 10, 64 << 10};

  std::array<std::uint32_t, 3> nanoseconds{};  // per read of each size, many in flight

  // Returns the largest gap between two rows for which one read of both rows costs less than two reads.
  std::uint64_t MergeGap() const;

  // Reads the files (each of 64 KiB at least) at random places for a tenth of a second. Throws IoError.
  static ReadCost Measure(BatchReader& reader, const std::vector<File*>& files);

  // Returns nothing when the file is missing or damaged.
  static std::optional<ReadCost> Load(Env& env, const std::string& directory);
  // Writes the file and returns its size. The file is not synced: after a crash the costs are measured again.
  std::uint64_t Save(Env& env, const std::string& directory) const;
};

}  // namespace tierstore
