// Holds the state of a store in memory: its commits, its segments, the index of its rows, and its bytes. The
// working parts (Appender, Committer, Compactor, Reader, Recovery, Snapshots) share the state.
//
// Guarded by the store's mutex (store/store_mutex.h).
#pragma once

#include "store/commit_log.h"
#include "store/row_index.h"
#include "store/segment_set.h"
#include "store/space.h"

namespace tierstore {

struct StoreState {
  StoreState(const StoreContext& context, CompactorControl& control)
      : segments(context, control), rows(context, segments), space(context, rows, segments, commits) {}
  StoreState(const StoreState&) = delete;
  StoreState& operator=(const StoreState&) = delete;

  CommitLog commits;
  SegmentSet segments;
  RowIndex rows;
  Space space;
};

}  // namespace tierstore
