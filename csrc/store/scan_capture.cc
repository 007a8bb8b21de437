#include "store/scan_capture.h"

#include <algorithm>
#include <new>

#include "common/key.h"

namespace tierstore {

ScanCapture::ScanCapture(const std::vector<std::uint32_t>& tables) {
  for (const std::uint32_t table : tables) {
    if (table >= wanted_.size()) wanted_.resize(table + 1);
    wanted_[table] = true;
  }
}

void ScanCapture::Add(RowClass& row_class) {
  Class& added = classes_.emplace_back(Class{&row_class, {}, {}, false});
  added.parts.resize(row_class.segments.size());
  for (const SegmentPtr& segment : row_class.segments) {
    if (segment != nullptr)
      added.parts[segment->ordinal] = {segment->number, 0, segment->slots, segment->live, {}};
  }
}

bool ScanCapture::Wants(std::uint64_t key) const {
  const std::uint32_t table = KeyTable(key);
  return table < wanted_.size() && wanted_[table];
}

void ScanCapture::RowLeaves(const Segment& segment, std::uint32_t slot, std::uint64_t key) noexcept try {
  const auto found = std::find_if(classes_.begin(), classes_.end(), [&](const Class& candidate) {
    return candidate.row_class == segment.row_class;
  });
  if (found == classes_.end() || segment.ordinal >= found->parts.size()) return;
  Part& part = found->parts[segment.ordinal];
  if (part.number != segment.number || slot >= part.end) return;
  if (slot < part.next) {
    const auto damaged = std::lower_bound(part.damaged.begin(), part.damaged.end(), slot);
    if (damaged == part.damaged.end() || *damaged != slot) return;  // the row is given
    part.damaged.erase(damaged);
  }
  --part.left;
  if (Wants(key)) found->late.push_back(key);
} catch (const std::bad_alloc&) {
  failed_ = true;
}

}  // namespace tierstore
