#include "store/index_snapshot.h"

#include <algorithm>
#include <cerrno>

#include "common/crc32c.h"
#include "io/aligned_buffer.h"
#include "io/errors.h"

namespace tierstore {
namespace {

constexpr char kMagic[9] = "TSTINDEX";
constexpr std::uint32_t kVersion = 3, kOldestVersion = 2;  // the latter never has kChanged
constexpr std::size_t kPreambleBytes = 8 + 4 + 4;          // magic, version, bytes of the header behind it
constexpr std::uint32_t kMaxHeaderBytes = 256 << 20;
constexpr std::size_t kHashBytes = 6, kLocationBytes = 5, kEntryBytes = kHashBytes + kLocationBytes;

Bytes EncodeHeader(const SnapshotHeader& header) {
  Encoder body;
  body.Raw(header.store.data(), header.store.size()).Put(header.commit).Put(header.history);
  body.Put(static_cast<std::uint32_t>(header.classes.size()));
  for (const auto& row_class : header.classes) {
    body.Put(row_class.row_bytes).Put(row_class.slot_bits);
    body.Put(static_cast<std::uint32_t>(row_class.segments.size()));
    for (const auto& segment : row_class.segments) body.Put(segment.number).Put(segment.slots);
  }
  body.Put(static_cast<std::uint32_t>(header.tables.size()));
  for (const auto& table : header.tables) body.Put(table.table).Put(table.row_bytes).Put(table.entries);
  if (header.HasRanges()) {
    body.Put(header.range_bits);
    for (const auto& table : header.tables) {
      body.Put(static_cast<std::uint32_t>(table.ranges.size()));
      for (const auto& range : table.ranges) body.Put(range.number).Put(range.bits);
    }
  }
  Encoder out;
  out.Raw(kMagic, 8).Put(kVersion).Put(static_cast<std::uint32_t>(body.bytes().size()));
  out.Raw(body.bytes().data(), body.bytes().size());
  out.Put(Crc32c(out.bytes().data(), out.bytes().size()));
  return std::move(out.bytes());
}

// Returns as many bytes as EncodeHeader gives. Encoding would take long where there are many ranges.
std::uint64_t HeaderBytes(const SnapshotHeader& header) {
  std::uint64_t bytes = kPreambleBytes + header.store.size() + 8 + 8 + 4 + 4 + sizeof(std::uint32_t);
  for (const auto& row_class : header.classes) bytes += 12 + row_class.segments.size() * 8;
  for (const auto& table : header.tables) bytes += 16 + table.ranges.size() * 12;
  return bytes + (header.HasRanges() ? 4 + header.tables.size() * 4 : 0);
}

SnapshotHeader DecodeBody(Decoder& in) {
  SnapshotHeader header;
  std::memcpy(header.store.data(), in.Take(header.store.size()), header.store.size());
  header.commit = in.Get<std::uint64_t>();
  header.history = in.Get<std::uint64_t>();
  header.classes.resize(in.Count(12));
  for (auto& row_class : header.classes) {
    row_class.row_bytes = in.Get<std::uint32_t>();
    row_class.slot_bits = in.Get<std::uint32_t>();
    row_class.segments.resize(in.Count(8));
    for (auto& segment : row_class.segments) {
      segment.number = in.Get<std::uint32_t>();
      segment.slots = in.Get<std::uint32_t>();
    }
    if (row_class.slot_bits > kMaxSlotBits) in.Fail("the saved index has an impossible number of slot bits");
  }
  header.tables.resize(in.Count(16));
  for (auto& table : header.tables) {
    table.table = in.Get<std::uint32_t>();
    table.row_bytes = in.Get<std::uint32_t>();
    table.entries = in.Get<std::uint64_t>();
  }
  if (in.AtEnd()) return header;
  header.range_bits = in.Get<std::uint32_t>();
  if (header.range_bits < DenseRanges::kLeastRangeBits || header.range_bits > DenseRanges::kRangeBits)
    in.Fail("the saved index has an impossible number of range bits");
  for (auto& table : header.tables) {
    table.ranges.resize(in.Count(12));
    for (auto& range : table.ranges) {
      range.number = in.Get<std::uint64_t>();
      range.bits = in.Get<std::uint32_t>();
      if (range.bits == 0 || range.bits > DenseRanges::kMostBits ||
          range.number >> (48 - header.range_bits) != 0)
        in.Fail("the saved index has an impossible range");
    }
  }
  if (!in.AtEnd()) in.Fail("the saved index has bytes behind its end");
  return header;
}

std::uint64_t EntryAreaBytes(std::uint64_t entries) {
  const std::uint64_t groups =
      (entries + SnapshotReader::kEntriesPerGroup - 1) / SnapshotReader::kEntriesPerGroup;
  return entries * kEntryBytes + groups * 4;
}

std::uint64_t RangeBytes(const SnapshotHeader& header, const SnapshotHeader::Range& range) {
  return DenseRanges::ArrayBytes(header.range_bits, range.bits) + sizeof(std::uint32_t);
}

std::unique_ptr<File> CreateTemporary(Env& env, const std::string& directory, bool direct) {
  const std::string path = directory + "/" + kSnapshotTemporaryName;
  env.Remove(path);
  return env.Open(path, OpenMode::kCreate, direct);
}

}  // namespace

bool SnapshotHeader::HasRanges() const {
  return std::any_of(tables.begin(), tables.end(), [](const Table& table) { return !table.ranges.empty(); });
}

std::uint64_t SnapshotHeader::UsedBytes() const {
  std::uint64_t bytes = HeaderBytes(*this);
  for (const Table& table : tables) {
    bytes += EntryAreaBytes(table.entries);
    for (const Range& range : table.ranges) bytes += RangeBytes(*this, range);
  }
  return bytes;
}

std::uint64_t SnapshotHeader::FileBytes() const {
  return (UsedBytes() + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

SnapshotWriter::SnapshotWriter(Env& env, const std::string& directory, bool direct,
                               const SnapshotHeader& header)
    : env_(env),
      directory_(directory),
      file_(CreateTemporary(env, directory, direct)),
      out_(*file_),
      group_(SnapshotReader::kEntriesPerGroup * kEntryBytes) {
  const Bytes room(HeaderBytes(header));
  Append(room.data(), room.size());
}

void SnapshotWriter::Append(const std::byte* data, std::size_t size) {
  out_.Append(data, size);
  bytes_ += size;
}

void SnapshotWriter::AddGroup(const TableIndex::Entry* entries, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    std::memcpy(&group_[i * kEntryBytes], &entries[i].hash, kHashBytes);
    std::memcpy(&group_[i * kEntryBytes + kHashBytes], &entries[i].location, kLocationBytes);
  }
  AddRange(group_.data(), n * kEntryBytes);
}

void SnapshotWriter::AddRange(const std::byte* array, std::size_t size) {
  const std::uint32_t crc = Crc32c(array, size);
  Append(array, size);
  Append(reinterpret_cast<const std::byte*>(&crc), sizeof crc);
}

void SnapshotWriter::Finish() {
  out_.Finish();
  file_->Sync();
}

std::uint64_t SnapshotWriter::Install(const SnapshotHeader& header) {
  const Bytes encoded = EncodeHeader(header);
  AlignedBuffer blocks((encoded.size() + kBlockBytes - 1) / kBlockBytes * kBlockBytes);
  if (file_->Read(0, blocks.data(), blocks.size()) != blocks.size())
    throw IoError(EIO, file_->path(), "read back: the file is shorter than the bytes that were written");
  std::memcpy(blocks.data(), encoded.data(), encoded.size());
  file_->Write(0, blocks.data(), blocks.size());
  file_->Sync();
  file_.reset();
  env_.Rename(directory_ + "/" + kSnapshotTemporaryName, directory_ + "/" + kSnapshotName);
  env_.SyncDirectory(directory_);
  return header.FileBytes();
}

std::unique_ptr<SnapshotReader> SnapshotReader::Open(Env& env, const std::string& directory, bool direct,
                                                     const StoreId& store) {
  const std::string path = directory + "/" + kSnapshotName;
  try {
    if (!env.Exists(path)) return nullptr;
    std::unique_ptr<SnapshotReader> reader(new SnapshotReader(env.Open(path, OpenMode::kRead, direct)));
    return reader->ReadHeader(store) ? std::move(reader) : nullptr;
  } catch (const CorruptError&) {
    return nullptr;
  }
}

bool SnapshotReader::ReadHeader(const StoreId& store) {
  SequentialReader in(*file_);
  Bytes head(kPreambleBytes);
  if (!in.Read(head.data(), head.size())) return false;
  std::uint32_t body_bytes;
  std::memcpy(&version_, &head[8], 4);
  std::memcpy(&body_bytes, &head[12], 4);
  if (std::memcmp(head.data(), kMagic, 8) != 0 || version_ < kOldestVersion || version_ > kVersion)
    return false;
  if (body_bytes > kMaxHeaderBytes || body_bytes > file_->Size()) return false;
  head.resize(kPreambleBytes + body_bytes);
  std::uint32_t crc;
  if (!in.Read(&head[kPreambleBytes], body_bytes) || !in.Read(&crc, 4)) return false;
  if (Crc32c(head.data(), head.size()) != crc) return false;
  Decoder body({&head[kPreambleBytes], body_bytes}, kSnapshotName);
  header_ = DecodeBody(body);
  std::uint64_t offset = head.size() + sizeof crc;
  for (const auto& table : header_.tables) {
    if (table.entries > file_->Size() / kEntryBytes) return false;
    offsets_.push_back(offset);
    offset += EntryAreaBytes(table.entries);
    std::vector<std::uint64_t>& offsets = range_offsets_.emplace_back();
    for (const auto& range : table.ranges) {
      offsets.push_back(offset);
      offset += RangeBytes(header_, range);
    }
  }
  return header_.store == store && header_.FileBytes() == file_->Size();
}

std::uint64_t SnapshotReader::GroupsOf(std::size_t table) const {
  return (header_.tables[table].entries + kEntriesPerGroup - 1) / kEntriesPerGroup;
}

// Returns nullptr when the file ends before `size` bytes.
const std::byte* SnapshotReader::ReadBytes(std::uint64_t begin, std::uint64_t size,
                                           AlignedBuffer& buffer) const {
  const std::uint64_t end = begin + size, from = begin / kBlockBytes * kBlockBytes;
  const std::uint64_t whole = (end - from + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  if (buffer.size() < whole) buffer = AlignedBuffer(whole);
  if (file_->Read(from, buffer.data(), whole) < end - from) return nullptr;
  return buffer.data() + (begin - from);
}

bool SnapshotReader::ReadRange(std::size_t table, std::size_t range, Groups& out) const {
  const auto [number, bits] = header_.tables[table].ranges[range];
  const std::size_t size = DenseRanges::ArrayBytes(header_.range_bits, bits);
  const std::byte* const array =
      ReadBytes(range_offsets_[table][range], size + sizeof(std::uint32_t), out.bytes);
  if (array == nullptr) return false;
  std::uint32_t crc;
  std::memcpy(&crc, array + size, sizeof crc);
  if (Crc32c(array, size) != crc) return false;
  out.entries.clear();
  for (std::size_t position = 0; position >> header_.range_bits == 0; ++position) {
    Location location = DenseRanges::At(array, header_.range_bits, bits, position);
    if (location == TableIndex::kAbsent) continue;
    if (version_ == kVersion && location == DenseRanges::NoLocation(bits)) location = kChanged;
    out.entries.push_back({number << header_.range_bits | position, location});
  }
  return true;
}

bool SnapshotReader::Read(std::size_t table, std::uint64_t first_group, std::uint64_t groups,
                          Groups& groups_out) const {
  std::vector<TableIndex::Entry>& out = groups_out.entries;
  const std::uint64_t first = first_group * kEntriesPerGroup;
  out.resize(std::min(groups * kEntriesPerGroup, header_.tables[table].entries - first));
  const std::byte* at =
      ReadBytes(offsets_[table] + EntryAreaBytes(first), EntryAreaBytes(out.size()), groups_out.bytes);
  if (at == nullptr) return false;
  for (std::size_t done = 0; done < out.size();) {
    const std::size_t n = std::min(out.size() - done, kEntriesPerGroup);
    std::uint32_t crc;
    std::memcpy(&crc, at + n * kEntryBytes, sizeof crc);
    if (Crc32c(at, n * kEntryBytes) != crc) return false;
    for (std::size_t i = 0; i < n; ++i, at += kEntryBytes) {
      TableIndex::Entry& entry = out[done + i];
      entry = {};
      std::memcpy(&entry.hash, at, kHashBytes);
      std::memcpy(&entry.location, at + kHashBytes, kLocationBytes);
    }
    at += sizeof crc;
    done += n;
  }
  return true;
}

}  // namespace tierstore
