// Puts rows that a snapshot lacks, or all rows, into the index. The rows come from the footers (or records)
// of segments.
//
// Segments may come in any order. Of two versions of a row the version with the higher epoch is newer; with
// equal epochs the relocated version is, since compaction copies the newest version of a finished segment.
// Versions in a snapshot are older than all versions outside of it.
//
// Some millions of slots are replayed at once. Their keys are divided by their place in the index, so that
// threads work at different places: each thread changes locations in place. Keys that the hash index lacks
// make the index grow, so one thread puts these keys afterwards.
//
// The store's mutex is held throughout.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "store/context.h"
#include "store/snapshots.h"
#include "store/state.h"

namespace tierstore {

// ReplaySource has what a replay knows of a segment.
struct ReplaySource {
  std::uint32_t covered = 0;          // leading slots that came with the snapshot
  std::vector<std::uint32_t> epochs;  // by slot, of relocated segments that are replayed
};
using ReplaySources = std::map<const RowClass*, std::vector<ReplaySource>>;  // by ordinal

class IndexReplay {
 public:
  // `sources` has a source for each segment of the row classes.
  IndexReplay(const StoreContext& context, StoreState& state, Snapshots& snapshots, ReplaySources& sources)
      : context_(context), state_(state), snapshots_(snapshots), sources_(sources) {}

  // Puts the newest version of each row into the index, and counts them in Segment::live. Throws CorruptError
  // when needed bytes are damaged, IoError, CallEnded.
  void Run();

 private:
  struct Item {
    std::uint64_t key;
    Location location;
    std::uint32_t number;  // in the order of segments and slots
    std::uint32_t part;    // of the index
  };
  struct Batch;
  struct Tally;

  void Replay(RowClass& row_class, std::span<const SegmentPtr> segments);
  void Load(Batch& batch, std::size_t segment);
  void Divide(Batch& batch);
  void ReplaceInParallel(Batch& batch);
  void Replace(Batch& batch, const Item& item, Tally& tally);
  void PutRest(Batch& batch);
  void PutRun(Batch& batch, const Item* items, std::size_t n);

  const StoreContext& context_;
  StoreState& state_;
  Snapshots& snapshots_;
  ReplaySources& sources_;
};

}  // namespace tierstore
