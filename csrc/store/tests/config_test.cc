// The sizes of segments, one short of each bound, at it, and past it. Fails by abort.
#include "store/config.h"

#include <algorithm>
#include <cstdio>

#include "common/tests/check.h"

using namespace tierstore;

namespace {

// Segments of a 128th of the cap, from 128 KiB on; beyond 64 MiB, of a 128th of what is in use, up to 1 GiB.
void CheckSegmentSizes() {
  constexpr std::uint64_t kKiB = 1 << 10, kMiB = 1 << 20, kGiB = 1 << 30;
  StoreConfig config;
  for (const std::uint64_t off : {~std::uint64_t{0}, std::uint64_t{0}, std::uint64_t{1}}) {
    CHECK(SegmentBytes(config, 16 * kMiB + 128 * off, 0) == std::max(128 * kKiB, 128 * kKiB + off));
    CHECK(SegmentBytes(config, 8 * kGiB + 128 * off, 0) == std::min(64 * kMiB, 64 * kMiB + off));
    CHECK(SegmentBytes(config, 1024 * kGiB, 8 * kGiB + 128 * off) == std::max(64 * kMiB, 64 * kMiB + off));
    CHECK(SegmentBytes(config, 1024 * kGiB, 128 * kGiB + 128 * off) == std::min(kGiB, kGiB + off));
    CHECK(SegmentBytes(config, 128 * kGiB + 128 * off, 128 * kGiB) == std::min(kGiB, kGiB + off));
    config.segment_bytes = kGiB + off;
    CHECK(SegmentBytes(config, 16 * kMiB, 0) == std::min(kGiB, kGiB + off));
    CHECK(MostSegmentBytes(config) == std::min(kGiB, kGiB + off));
    config.segment_bytes = 0;
  }
  CHECK(SegmentBytes(config, 0, 0) == 128 * kKiB);
  CHECK(MostSegmentBytes(config) == kGiB);
}

}  // namespace

int main() {
  CheckSegmentSizes();
  std::puts("ok");
}
