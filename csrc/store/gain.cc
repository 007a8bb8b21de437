#include "store/gain.h"

namespace tierstore {

void GainCount::Count(const Victim& victim, const std::map<std::uint32_t, SegmentPtr>& segments) {
  const Segment& segment = *victim.segment;
  if (!victim.with_kept && segment.kept > 0) {
    if (copied_bytes_.size() > 2 * segments.size() + 16)
      std::erase_if(copied_bytes_, [&](const auto& entry) { return !segments.contains(entry.first); });
    copied_bytes_[segment.number] += segment.BytesOfCopies(victim.Left());
    return;
  }
  bytes_ += Gain(segment, victim.Left());
  if (const auto copied = copied_bytes_.extract(segment.number); !copied.empty()) Subtract(copied.mapped());
}

}  // namespace tierstore
