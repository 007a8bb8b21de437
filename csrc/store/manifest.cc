#include "store/manifest.h"

#include <cstdio>

#include "common/crc32c.h"

namespace tierstore {
namespace {

constexpr char kMagic[9] = "TSTMANIF";
constexpr std::size_t kMinCommitBytes = 8 + 8 + 8 + 4 + 4 + 4, kExtentBytes = 8;
constexpr std::uint32_t kAppendingFlag = 1u << 31;

}  // namespace

Bytes Manifest::Encode() const {
  Encoder out;
  out.Raw(kMagic, 8).Put(kFormatVersion).Raw(store.data(), store.size());
  out.Put(next_commit).Put(next_segment).Put(static_cast<std::uint32_t>(commits.size()));
  for (const CommitRecord& commit : commits) {
    out.Put(commit.id)
        .Put(commit.history)
        .Put(commit.unix_nanoseconds)
        .String(commit.tag)
        .String(commit.meta);
    out.Put(static_cast<std::uint32_t>(commit.segments.size()));
    for (const SegmentExtent& extent : commit.segments) {
      out.Put(extent.number).Put(extent.slots | (extent.appending ? kAppendingFlag : 0));
    }
  }
  out.Put(Crc32c(out.bytes().data(), out.bytes().size()));
  return std::move(out.bytes());
}

std::uint64_t Manifest::EncodedBytes() const {
  std::uint64_t bytes = 8 + 4 + store.size() + 8 + 4 + 4 + 4;
  for (const CommitRecord& commit : commits)
    bytes += kMinCommitBytes + commit.tag.size() + commit.meta.size() + commit.segments.size() * kExtentBytes;
  return bytes;
}

Manifest Manifest::Decode(std::span<const std::byte> in, const std::string& path) {
  Decoder decoder(in, path);
  if (std::memcmp(decoder.Take(8), kMagic, 8) != 0) decoder.Fail("the file is not a manifest of tierstore");
  const auto version = decoder.Get<std::uint32_t>();
  std::uint32_t crc = 0;
  if (in.size() >= 4) std::memcpy(&crc, in.data() + in.size() - 4, 4);
  if (Crc32c(in.data(), in.size() - 4) != crc) decoder.Fail("the manifest is damaged (checksum mismatch)");
  if (version != kFormatVersion) decoder.Fail(UnknownFormat(version));
  Manifest manifest;
  std::memcpy(manifest.store.data(), decoder.Take(manifest.store.size()), manifest.store.size());
  manifest.next_commit = decoder.Get<std::uint64_t>();
  manifest.next_segment = decoder.Get<std::uint32_t>();
  manifest.commits.resize(decoder.Count(kMinCommitBytes));
  for (CommitRecord& commit : manifest.commits) {
    commit.id = decoder.Get<std::uint64_t>();
    commit.history = decoder.Get<std::uint64_t>();
    commit.unix_nanoseconds = decoder.Get<std::int64_t>();
    commit.tag = decoder.String();
    commit.meta = decoder.String();
    commit.segments.resize(decoder.Count(kExtentBytes));
    for (SegmentExtent& extent : commit.segments) {
      extent.number = decoder.Get<std::uint32_t>();
      const auto slots = decoder.Get<std::uint32_t>();
      extent.slots = slots & ~kAppendingFlag;
      extent.appending = (slots & kAppendingFlag) != 0;
      if (extent.number >= manifest.next_segment || extent.slots > kMaxSlots)
        decoder.Fail("the manifest names an impossible segment");
    }
    if (commit.id >= manifest.next_commit) decoder.Fail("the manifest names an impossible commit");
  }
  decoder.Take(4);
  if (!decoder.AtEnd()) decoder.Fail("the manifest has bytes behind its end");
  return manifest;
}

std::optional<Manifest> Manifest::Load(Env& env, const std::string& directory) {
  const std::string path = directory + "/" + kManifestName;
  if (!env.Exists(path)) return std::nullopt;
  return Decode(ReadWholeFile(env, path, kMaxBytes), path);
}

std::uint64_t Manifest::WriteTemporary(Env& env, const std::string& directory) const {
  const std::string temporary = directory + "/" + kManifestTemporaryName;
  const Bytes bytes = Encode();
  env.Remove(temporary);
  auto file = env.Open(temporary, OpenMode::kCreate, false);
  file->Write(0, bytes.data(), bytes.size());
  file->Sync();
  return bytes.size();
}

void Manifest::Install(Env& env, const std::string& directory) {
  env.Rename(directory + "/" + kManifestTemporaryName, directory + "/" + kManifestName);
  env.SyncDirectory(directory);
}

std::string SegmentName(std::uint32_t number) {
  char name[32];
  std::snprintf(name, sizeof name, "%08u.seg", number);
  return name;
}

std::optional<std::uint32_t> ParseSegmentName(const std::string& name) {
  if (name.size() < 12 || name.size() > 14 || !name.ends_with(".seg")) return std::nullopt;
  std::uint64_t number = 0;
  for (const char c : name.substr(0, name.size() - 4)) {
    if (c < '0' || c > '9') return std::nullopt;
    number = number * 10 + static_cast<std::uint64_t>(c - '0');
  }
  if (number > 0xffffffffu || SegmentName(static_cast<std::uint32_t>(number)) != name) return std::nullopt;
  return static_cast<std::uint32_t>(number);
}

Bytes ReadWholeFile(Env& env, const std::string& path, std::uint64_t limit) {
  auto file = env.Open(path, OpenMode::kRead, false);
  const std::uint64_t size = file->Size();
  if (size > limit)
    throw CorruptError(path + ": the file has " + std::to_string(size) + " bytes, more than the " +
                       std::to_string(limit) + " bytes that are allowed");
  Bytes bytes(size);
  bytes.resize(file->Read(0, bytes.data(), size));
  return bytes;
}

}  // namespace tierstore
