// The manifest is the only file that names the commits. A new manifest is written whole to a temporary name,
// synced and renamed, so there is always exactly one manifest, old or new. docs/reference/formats.md
// specifies its bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/env.h"
#include "store/format.h"

namespace tierstore {

struct SegmentExtent {
  std::uint32_t number;
  std::uint32_t slots;  // leading slots that belong to the commit
  bool appending;       // rows were being appended to it, so its number is the highest epoch of its row size
};

struct CommitRecord {
  std::uint64_t id = 0;
  std::uint64_t history = 0;  // a number that grows when a store goes on from an older commit
  std::int64_t unix_nanoseconds = 0;
  std::string tag;   // "" for none
  std::string meta;  // any bytes
  std::vector<SegmentExtent> segments;
};

struct Manifest {
  static constexpr std::uint64_t kMaxBytes = 1 << 30;

  StoreId store{};
  std::uint64_t next_commit = 1;
  std::uint32_t next_segment = 1;
  std::vector<CommitRecord> commits;  // the kept commits, the oldest first

  Bytes Encode() const;
  std::uint64_t EncodedBytes() const;
  static Manifest Decode(std::span<const std::byte> in, const std::string& path);

  // Returns nothing when there is no manifest yet.
  static std::optional<Manifest> Load(Env& env, const std::string& directory);
  // Makes the first step of replacing the manifest: writes the temporary file, durably. Returns its size.
  std::uint64_t WriteTemporary(Env& env, const std::string& directory) const;
  // Makes the second step. Returns when the new manifest is durable. When this function throws, either
  // manifest may be in force.
  static void Install(Env& env, const std::string& directory);
};

inline constexpr char kManifestName[] = "MANIFEST";
inline constexpr char kManifestTemporaryName[] = "MANIFEST.tmp";

std::string SegmentName(std::uint32_t number);  // "00000042.seg"
// Returns the number in a segment's name; nothing for other names.
std::optional<std::uint32_t> ParseSegmentName(const std::string& name);

// Returns the contents of a small file, which has at most `limit` bytes.
Bytes ReadWholeFile(Env& env, const std::string& path, std::uint64_t limit);

}  // namespace tierstore
