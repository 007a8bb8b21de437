// Verification reads every byte that a kept commit or the saved index has on disk, and names damaged bytes.
//
// Verification changes nothing and needs no open store. It reads past the page cache. It takes 4 MiB and a
// footer per thread, and the saved index (up to 12 bytes per row) where there is one.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "io/env.h"

namespace tierstore {

struct Finding {
  std::string file;  // name within the directory
  std::uint64_t offset = 0, bytes = 0;
  std::string what;
  bool lost = true;                    // false: nothing is lost, the store works without these bytes
  std::vector<std::uint64_t> commits;  // kept commits that need the bytes
  std::vector<std::uint32_t> tables;   // tables with rows there, where these are known
  std::vector<std::uint64_t> keys;     // of the damaged records, as far as a footer tells them
};

struct VerifyReport {
  static constexpr std::size_t kMaxFindings = 1000, kMaxKeys = 16;

  std::vector<Finding> findings;  // the first kMaxFindings
  std::uint64_t findings_total = 0;
  std::uint64_t files = 0, bytes = 0;    // checked
  std::uint64_t records = 0, voids = 0;  // intact
  std::uint64_t commits = 0;             // kept
  std::uint64_t index_entries = 0;       // of the saved index, compared with the segments
  std::vector<std::string> leftovers;    // of a crash, which the next opening removes
  std::vector<std::string> foreign;      // files that are not the store's
};

// Verifies a store. `row_bytes` has the row size of each table; empty if unknown. `progress` is called now
// and then with bytes done and bytes in all, on the calling thread, and may throw to stop. Throws IoError
// only when the directory cannot be listed.
VerifyReport VerifyStore(Env& env, const std::string& directory,
                         const std::map<std::uint32_t, std::uint32_t>& row_bytes,
                         const std::function<void(std::uint64_t, std::uint64_t)>& progress);

}  // namespace tierstore
