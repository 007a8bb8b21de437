#include "store/config.h"

#include <algorithm>

namespace tierstore {
namespace {

constexpr std::uint64_t kMinSegmentBytes = 128 << 10;
constexpr std::uint64_t kSegments = 128;  // so many segments make up the cap, or the bytes in use

}  // namespace

std::uint64_t MostSegmentBytes(const StoreConfig& config) {
  return config.segment_bytes == 0 ? kMaxSegmentBytes : std::min(config.segment_bytes, kMaxSegmentBytes);
}

std::uint64_t SegmentBytes(const StoreConfig& config, std::uint64_t cap_bytes, std::uint64_t used_bytes) {
  if (config.segment_bytes != 0) return MostSegmentBytes(config);
  const std::uint64_t most = std::clamp(cap_bytes / kSegments, kMinSegmentBytes, kMaxSegmentBytes);
  return std::min(most, std::max(config.limits.small_segment_bytes, used_bytes / kSegments));
}

}  // namespace tierstore
