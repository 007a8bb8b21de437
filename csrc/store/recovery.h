// Opens a store. The manifest names the commits. Files of the store that no kept commit needs are left by a
// crash, and are removed.
//
// An opening has these steps, in this order: load the manifest, or write the first one; sync the directory,
// since the process that renamed the manifest may have died before the name was durable; remove temporary
// files and segments that no kept commit names; open the segments that a kept commit names; rebuild the index
// (store/index_rebuild.h); cut off what lies behind the commit's rows in the segments that it was appending
// to, and go on there.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "store/committer.h"
#include "store/context.h"
#include "store/reader.h"
#include "store/snapshots.h"
#include "store/state.h"

namespace tierstore {

class Recovery {
 public:
  // `state` is empty.
  Recovery(StoreContext& context, StoreState& state, Reader& reader, Snapshots& snapshots,
           Committer& committer)
      : context_(context), state_(state), reader_(reader), snapshots_(snapshots), committer_(committer) {}

  // Fills the state as of StoreConfig::at_commit, and the store's id. `tables` are the (table, row_bytes)
  // pairs that are known beforehand. Throws CorruptError, IoError, CallEnded, and InputError when that commit
  // is not kept, or the tables have changed.
  void Run(StoreMutex& mutex, const std::vector<std::pair<std::uint32_t, std::uint32_t>>& tables);

 private:
  Manifest LoadOrCreateManifest(const std::vector<std::string>& names);
  void RemoveLeftovers(const std::vector<std::string>& names);
  const CommitRecord* ChooseCommit() const;
  void OpenSegments();
  SegmentPtr OpenSegment(const SegmentExtent& extent);
  void ResumeAppending(RowClass& row_class);

  StoreContext& context_;
  StoreState& state_;
  Reader& reader_;
  Snapshots& snapshots_;
  Committer& committer_;
};

}  // namespace tierstore
