// The commits that a store keeps, and the place in its history that it stands at.
//
// Recovery fills the log, the Committer changes the log, and the other parts only read it. Guarded by the
// store's mutex (store/store_mutex.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "store/manifest.h"

namespace tierstore {

struct CommitLog {
  std::vector<CommitRecord> kept;  // as the manifest in force lists them, oldest first
  std::uint64_t next_id = 1;
  std::uint64_t next_history = 0;  // the history that the next commit belongs to
  // The commit that was opened or made last, or is being made. It may be none of the kept commits: its id is
  // 0 before the first.
  std::uint64_t current_id = 0, current_history = 0;
  std::string meta;  // what the commit that was opened or made last keeps; "" before the first

  // Returns nullptr when the commit is not kept.
  const CommitRecord* Find(std::uint64_t id) const {
    const auto found =
        std::find_if(kept.begin(), kept.end(), [id](const CommitRecord& commit) { return commit.id == id; });
    return found == kept.end() ? nullptr : &*found;
  }
  const CommitRecord* Current() const { return Find(current_id); }
};

}  // namespace tierstore
