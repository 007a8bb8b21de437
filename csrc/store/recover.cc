// Opening: the manifest says what is committed; everything else in the directory is what a crash left, and
// goes.
#include <algorithm>
#include <bit>
#include <random>

#include "common/call_limit.h"
#include "common/key.h"
#include "io/aligned_buffer.h"
#include "store/store.h"

namespace tierstore {
namespace {

StoreId RandomStoreId() {
  std::random_device random;
  StoreId id;
  for (std::size_t i = 0; i < id.size(); i += 4) {
    const std::uint32_t word = random();
    std::memcpy(&id[i], &word, 4);
  }
  return id;
}

const CommitRecord* FindCommit(const std::vector<CommitRecord>& commits, std::uint64_t id) {
  for (const CommitRecord& commit : commits) {
    if (commit.id == id) return &commit;
  }
  return nullptr;
}

SegmentHeader ReadSegmentHeader(File& file) {
  AlignedBuffer block(kSegmentHeaderBytes);
  const std::size_t got = file.Read(0, block.data(), block.size());
  return SegmentHeader::Decode({block.data(), got}, file.path());
}

}  // namespace

void Store::Recover(const std::vector<std::pair<std::uint32_t, std::uint32_t>>& tables) {
  const std::vector<std::string> names = env_.List(directory_);
  const Manifest manifest = LoadOrCreateManifest(names);
  store_id_ = manifest.store;
  next_commit_ = manifest.next_commit;
  next_segment_ = manifest.next_segment;
  commits_ = manifest.commits;

  std::set<std::uint32_t> named;
  for (const CommitRecord& commit : commits_) {
    for (const SegmentExtent& extent : commit.segments) named.insert(extent.number);
  }
  for (const char* temporary : {kManifestTemporaryName, kSnapshotTemporaryName, kReadCostTemporaryName}) {
    if (std::find(names.begin(), names.end(), temporary) != names.end())
      env_.Remove(directory_ + "/" + temporary);
  }
  for (const std::string& name : names) {
    const auto number = ParseSegmentName(name);
    if (!number) continue;
    next_segment_ = std::max(next_segment_, *number + 1);
    if (!named.contains(*number)) env_.Remove(directory_ + "/" + name);
  }

  if (const auto cost = ReadCost::Load(env_, directory_)) merge_gap_bytes_ = cost->MergeGap();
  if (std::find(names.begin(), names.end(), kReadCostName) != names.end()) read_cost_bytes_ = kBlockBytes;
  Lock lock(mutex_);
  for (const auto& [table, row_bytes] : tables) TableFor(table, row_bytes);
  OpenSegments(manifest);
  RebuildIndex();
}

Manifest Store::LoadOrCreateManifest(const std::vector<std::string>& names) {
  if (auto manifest = Manifest::Load(env_, directory_)) {
    manifest_bytes_ = manifest->Encode().size();
    // Whoever renamed it may have died before the name was durable; what only the manifest before it names is
    // about to be removed.
    env_.SyncDirectory(directory_);
    return *std::move(manifest);
  }
  if (std::any_of(names.begin(), names.end(),
                  [](const auto& name) { return ParseSegmentName(name).has_value(); })) {
    throw CorruptError(
        directory_ + "/" + kManifestName +
        ": is missing, though there are segments; restore it from a copy, or move the segments away "
        "to begin anew");
  }
  Manifest manifest;
  manifest.store = config_.store_id ? *config_.store_id : RandomStoreId();
  manifest_bytes_ = manifest.WriteTemporary(env_, directory_);
  Manifest::Install(env_, directory_);
  return manifest;
}

void Store::OpenSegments(const Manifest& manifest) {
  const CommitRecord* current = nullptr;
  if (config_.at_commit != 0) {
    current = FindCommit(commits_, config_.at_commit);
    if (current == nullptr) {
      throw InputError(directory_ + ": commit " + std::to_string(config_.at_commit) + " is not kept");
    }
  } else if (!commits_.empty()) {
    current = &commits_.back();
  }
  std::map<std::uint32_t, SegmentExtent> now;  // the current commit's segments
  for (const CommitRecord& commit : commits_) history_ = std::max(history_, commit.history);
  if (current != nullptr) {
    current_commit_ = current->id;
    commit_history_ = current->history;
    history_ = current == &commits_.back() ? current->history : history_ + 1;
    meta_ = current->meta;
    for (const SegmentExtent& extent : current->segments) now[extent.number] = extent;
  }
  for (const CommitRecord& commit : manifest.commits) {
    for (const SegmentExtent& extent : commit.segments) {
      SegmentPtr& segment = segments_[extent.number];
      if (segment == nullptr) {
        CheckCall();
        const auto found = now.find(extent.number);
        segment = OpenSegment(found == now.end() ? SegmentExtent{extent.number, 0, false} : found->second);
      }
      ++segment->pins;
      segment->pinned_slots = std::max(segment->pinned_slots, extent.slots);
    }
  }
  for (auto& [row_bytes, row_class] : classes_) {
    const std::size_t count = row_class->segments.size();
    if (count << row_class->slot_bits > TableIndex::kMaxLocation) {
      throw InputError(directory_ + ": holds more than 2^32 row versions of one size");
    }
  }
}

// A segment without slots is only kept for other commits.
SegmentPtr Store::OpenSegment(const SegmentExtent& extent) {
  auto segment = std::make_shared<Segment>();
  segment->number = extent.number;
  segment->path = directory_ + "/" + SegmentName(extent.number);
  segment->file = env_.Open(segment->path, OpenMode::kUpdate, config_.direct);
  const SegmentHeader header = ReadSegmentHeader(*segment->file);
  if (header.store != store_id_ || header.number != extent.number) {
    throw CorruptError(segment->path + ": belongs to another store or is another segment");
  }
  segment->relocated = header.relocated;
  segment->crc_prefix = RecordCrcPrefix(store_id_, extent.number);
  segment->file_bytes = segment->file->Size();
  segment->reserved_bytes = segment->file_bytes;
  reserved_bytes_ += segment->reserved_bytes;
  RowClass& row_class = ClassFor(header.row_bytes);
  segment->row_class = &row_class;
  segment->sealed = !extent.appending;
  segment->slots = segment->durable_slots = segment->flushed_slots = extent.slots;
  if (extent.slots == 0) {
    segment->retired = true;
    return segment;
  }
  if (segment->file_bytes < row_class.geometry.EndOffset(extent.slots)) {
    throw CorruptError(segment->path + ": is cut off at " + std::to_string(segment->file_bytes) + " bytes; " +
                       std::to_string(row_class.geometry.EndOffset(extent.slots)) + " are committed");
  }
  row_class.SetSlotBits(static_cast<unsigned>(std::bit_width(extent.slots - 1)), config_.limits.locations);
  segment->ordinal = static_cast<std::uint32_t>(row_class.segments.size());
  row_class.segments.push_back(segment);
  return segment;
}

// At least the keys (and epochs) of the segment's slots from `first_slot` on; those before it may be missing
// (0).
Footer Store::ReadFooterOrScan(Segment& segment, std::uint32_t first_slot) {
  const RowClass& row_class = *segment.row_class;
  const Geometry& geometry = row_class.geometry;
  const SegmentHeader header{geometry.row_bytes, segment.number, segment.relocated, store_id_};
  if (auto footer = Footer::Load(*segment.file, header); footer && footer->keys.size() >= segment.slots) {
    return *std::move(footer);
  }
  Footer footer;
  AlignedBuffer buffer(row_class.chunk_bytes);
  const std::uint32_t skipped = first_slot / row_class.slots_per_chunk * row_class.slots_per_chunk;
  footer.keys.resize(skipped);
  if (segment.relocated) footer.epochs.resize(skipped);
  for (std::uint32_t first = skipped; first < segment.slots; first += row_class.slots_per_chunk) {
    const std::uint32_t last = std::min(segment.slots, first + row_class.slots_per_chunk);
    const std::uint64_t offset = geometry.Offset(first), size = geometry.EndOffset(last) - offset;
    CheckCall();
    const std::size_t got = segment.file->Read(offset, buffer.data(), size);
    for (std::uint32_t slot = first; slot < last; ++slot) {
      const std::uint64_t at = geometry.Offset(slot) - offset;
      const std::byte* record = buffer.data() + at;
      if (at + geometry.record_bytes > got || !RecordIsIntact(record, slot, geometry, segment.crc_prefix)) {
        throw CorruptError(
            segment.path + ": the record at offset " + std::to_string(offset + at) +
            " is damaged (checksum mismatch), and the segment has no valid footer that tells its key");
      }
      const RecordHeader record_header = LoadRecordHeader(record);
      footer.keys.push_back(record_header.key);
      if (segment.relocated) footer.epochs.push_back(record_header.epoch);
      if (record_header.epoch == 0) footer.voids.push_back(slot);
    }
  }
  return footer;
}

// Goes on appending where the commit ended, unless a kept commit names more of the segment.
void Store::ResumeAppending(RowClass& row_class) {
  for (const SegmentPtr& segment : row_class.segments) {
    if (segment == nullptr || segment->sealed) continue;
    segment->sealed = true;
    if (config_.read_only) continue;
    if (segment->slots >= row_class.slots_per_segment || segment->pinned_slots > segment->slots) continue;
    Stream stream = segment->relocated ? kOfCommit : kFromCallers;
    if (segment->relocated && row_class.active[stream] != nullptr) stream = kSinceCommit;
    if (segment->live == 0 || row_class.active[stream] != nullptr) continue;
    const std::uint64_t end = row_class.geometry.EndOffset(segment->slots);
    Footer footer = ReadFooterOrScan(*segment, 0);
    footer.keys.resize(segment->slots);
    if (segment->relocated) footer.epochs.resize(segment->slots);
    std::erase_if(footer.voids, [&](std::uint32_t slot) { return slot >= segment->slots; });
    segment->file->Truncate(end);
    segment->footer = std::move(footer);
    segment->sealed = false;
    segment->file_bytes = end;
    reserved_bytes_ -= segment->reserved_bytes;
    segment->reserved_bytes = row_class.MaxSegmentBytes(segment->relocated);
    reserved_bytes_ += segment->reserved_bytes;
    segment->stream = stream;
    row_class.active[stream] = segment;
  }
}

}  // namespace tierstore
