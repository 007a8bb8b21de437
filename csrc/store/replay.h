// What rebuilding the index has to know of each segment while it goes on.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "store/store.h"

namespace tierstore {

struct Store::Replay {
  struct Source {
    std::uint32_t covered = 0;          // the first so many slots came with the snapshot
    std::vector<std::uint32_t> epochs;  // by slot, of relocated segments that are replayed
  };

  // Of every segment that the index points to.
  std::map<const Segment*, Source> sources;
  // Segments that the snapshot names and the commit does not: in the end nothing may point to them.
  std::vector<SegmentPtr> ghosts;

  // Of two versions of a row the one with the higher age is newer.
  std::uint64_t AgeOf(const Segment& segment, std::uint32_t slot) const {
    const Source& source = sources.at(&segment);
    if (slot < source.covered) return 0;
    const std::uint64_t epoch = segment.relocated ? source.epochs[slot] : segment.number;
    return epoch << 32 | std::uint64_t{segment.relocated} << 31 | slot;
  }
};

}  // namespace tierstore
