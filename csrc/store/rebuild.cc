// The index of a commit: from the snapshot, if there is one, and from the footers (or records) of what came
// after.
//
// Segments may come in any order. Of two versions of a row the one with the higher epoch is newer; with equal
// epochs a relocated one is, since compaction copies the newest of a finished segment. What a snapshot holds
// is older than all that is not in it.
#include <algorithm>

#include "common/call_limit.h"
#include "common/key.h"
#include "store/replay.h"
#include "store/store.h"

namespace tierstore {
namespace {

constexpr std::size_t kKeysPerRun = 256;

}  // namespace

void Store::RebuildIndex() {
  const auto replay_all = [this](Replay& replay) {
    for (auto& [row_bytes, row_class] : classes_) {
      for (std::size_t i = 0; i < row_class->segments.size(); ++i) {
        const SegmentPtr segment = row_class->segments[i];
        if (replay.sources[segment.get()].covered < segment->slots) ReplaySegment(*segment, replay);
      }
    }
  };
  Replay replay;
  if (LoadSnapshot(replay)) {
    replay_all(replay);
    const auto is_used = [](const SegmentPtr& ghost) { return ghost->live > 0; };
    if (std::any_of(replay.ghosts.begin(), replay.ghosts.end(), is_used)) {
      ForgetIndex(replay);  // the snapshot is not of this history
      replay_all(replay);
    }
  } else {
    ForgetIndex(replay);
    replay_all(replay);
  }
  for (const SegmentPtr& ghost : replay.ghosts) ghost->row_class->segments[ghost->ordinal].reset();
  for (auto& [row_bytes, row_class] : classes_) {
    ResumeAppending(*row_class);
    const std::vector<SegmentPtr> segments = row_class->segments;
    for (const SegmentPtr& segment : segments) {
      if (segment != nullptr) RetireIfDead(segment);
    }
  }
  BeginInterval();
}

void Store::ReplaySegment(Segment& segment, Replay& replay) {
  Replay::Source& source = replay.sources[&segment];
  Footer footer = ReadFooterOrScan(segment, source.covered);
  source.epochs = std::move(footer.epochs);
  std::uint64_t keys[kKeysPerRun];
  std::uint32_t slots[kKeysPerRun];
  std::size_t n = 0;
  auto void_slot = std::lower_bound(footer.voids.begin(), footer.voids.end(), source.covered);
  for (std::uint32_t slot = source.covered; slot < segment.slots; ++slot) {
    if (void_slot != footer.voids.end() && *void_slot == slot) {
      ++void_slot;
      continue;
    }
    if (n == kKeysPerRun || (n > 0 && KeyTable(keys[0]) != KeyTable(footer.keys[slot]))) {
      ReplayRun(segment, keys, slots, std::exchange(n, 0), replay);
    }
    keys[n] = footer.keys[slot];
    slots[n++] = slot;
  }
  if (n > 0) ReplayRun(segment, keys, slots, n, replay);
}

// Keys of one table.
void Store::ReplayRun(Segment& segment, const std::uint64_t* keys, const std::uint32_t* slots, std::size_t n,
                      Replay& replay) {
  CheckCall();
  RowClass& row_class = *segment.row_class;
  TableIndex& index = TableFor(KeyTable(keys[0]), row_class.geometry.row_bytes).index;
  std::uint32_t previous[kKeysPerRun];
  index.Find(keys, n,
             previous);  // brings the entries into the cache; a key may come twice, so one by one below
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t there = index.Put(keys[i], row_class.Location(segment, slots[i]));
    ++segment.live;
    if (there == TableIndex::kAbsent) continue;
    Segment& other = *row_class.SegmentOf(there);
    if (replay.AgeOf(other, row_class.SlotOf(there)) > replay.AgeOf(segment, slots[i])) {
      index.Put(keys[i], there);
      --segment.live;
    } else {
      --other.live;
    }
  }
  rebuilt_rows_ += n;
  unsnapshotted_bytes_ += n * row_class.geometry.record_bytes;
}

}  // namespace tierstore
