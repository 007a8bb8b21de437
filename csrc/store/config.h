// Declares the options with which a store is opened.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "io/env.h"
#include "store/index.h"
#include "store/manifest.h"
#include "store/segment.h"
#include "store/table_locations.h"

namespace tierstore {

// A read sorts rows by words that have a location and a position each.
inline constexpr unsigned kPositionBits = 64 - TableIndex::kLocationBits;
inline constexpr std::size_t kMostKeysAtOnce = std::size_t{1} << kPositionBits;

// Bounds of a store. Tests make the bounds small, to reach them.
struct StoreLimits {
  std::size_t chunk_bytes = Chunk::kBytes;             // bytes that are written at once
  std::uint64_t locations = TableIndex::kMaxLocation;  // locations that row versions of one size have
  unsigned slot_bits = 0;                              // the least bits of a slot in a location
  std::uint64_t small_segment_bytes = 64 << 20;        // segments grow up to here with the cap alone
  std::size_t keys_at_once = kMostKeysAtOnce;          // keys that a read sorts by place; a power of two
  std::uint64_t replay_rows = 1 << 27;                 // rows read after a crash, or a quarter of all
  std::uint64_t manifest_bytes = Manifest::kMaxBytes;
};

struct StoreConfig {
  std::uint64_t cap_bytes = std::uint64_t{1} << 40;  // the most bytes that all files take
  std::uint64_t segment_bytes = 0;                   // the most bytes of a segment; 0: the cap decides
  ReadEngine read_engine = ReadEngine::kAuto;
  unsigned queue_depth = 128;                 // reads in flight on each device
  bool direct = true;                         // IO goes past the page cache where the file system allows that
  std::size_t keep_commits = 1;               // the next commit drops older commits without a tag
  std::uint64_t at_commit = 0;                // the commit that the store is opened at; 0: the last
  bool read_only = false;                     // nothing is resumed, compacted or saved; needs a ReadOnlyEnv
  std::size_t write_buffer_bytes = 16 << 20;  // for each device
  std::uint64_t snapshot_min_rows = 1 << 17;  // smaller stores open fast without a snapshot
  std::optional<StoreId> store_id;            // the id of a new store; random unless given
  IndexForm index;
  StoreLimits limits;
};

// Returns the most bytes of a new segment in a store with this cap, of which this much is in use. Segments
// grow with both numbers, so that few segments hold much, and half filled and free segments take a small
// share.
std::uint64_t SegmentBytes(const StoreConfig& config, std::uint64_t cap_bytes, std::uint64_t used_bytes);
// Returns the most bytes that a new segment may come to take, whatever cap is set later.
std::uint64_t MostSegmentBytes(const StoreConfig& config);

}  // namespace tierstore
