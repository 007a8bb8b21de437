#include "store/recovery.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <set>

#include "common/call_limit.h"
#include "io/aligned_buffer.h"
#include "store/errors.h"
#include "store/index_rebuild.h"
#include "store/read_cost.h"

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

SegmentHeader ReadSegmentHeader(File& file) {
  AlignedBuffer block(kSegmentHeaderBytes);
  const std::size_t got = file.Read(0, block.data(), block.size());
  return SegmentHeader::Decode({block.data(), got}, file.path());
}

bool Contains(const std::vector<std::string>& names, const char* name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

void Recovery::Run(StoreMutex& mutex, const std::vector<std::pair<std::uint32_t, std::uint32_t>>& tables) {
  const std::vector<std::string> names = context_.env.List(context_.directory);
  Manifest manifest = LoadOrCreateManifest(names);
  context_.id = manifest.store;
  state_.commits.next_id = manifest.next_commit;
  state_.commits.kept = std::move(manifest.commits);
  state_.segments.SkipNumbersBelow(manifest.next_segment);
  RemoveLeftovers(names);

  if (const auto cost = ReadCost::Load(context_.env, context_.directory))
    reader_.SetMergeGap(cost->MergeGap());
  if (Contains(names, kReadCostName)) state_.space.SetFileBytes(MetaFile::kReadCost, kBlockBytes);
  const Lock lock(mutex);
  for (const auto& [table, row_bytes] : tables) state_.rows.TableFor(table, row_bytes);
  OpenSegments();
  IndexRebuild(context_, state_, snapshots_).Run();
  for (const auto& [row_bytes, row_class] : state_.rows.classes()) {
    for (const SegmentPtr& segment : row_class->segments) {
      if (segment == nullptr) continue;
      row_class->counts.slots += segment->slots;
      row_class->counts.live += segment->live;
    }
    ResumeAppending(*row_class);
    const std::vector<SegmentPtr> segments = row_class->segments;
    for (const SegmentPtr& segment : segments) {
      if (segment != nullptr) state_.segments.RetireIfDead(segment);
    }
  }
  committer_.BeginInterval();
}

Manifest Recovery::LoadOrCreateManifest(const std::vector<std::string>& names) {
  if (auto manifest = Manifest::Load(context_.env, context_.directory)) {
    state_.space.SetFileBytes(MetaFile::kManifest, manifest->Encode().size());
    // Segments that only the manifest before this manifest names are about to be removed.
    context_.env.SyncDirectory(context_.directory);
    return *std::move(manifest);
  }
  if (std::any_of(names.begin(), names.end(),
                  [](const auto& name) { return ParseSegmentName(name).has_value(); })) {
    throw CorruptError(context_.PathOf(kManifestName) +
                       ": the file is missing, though there are segments; restore the file from a copy, or "
                       "move the segments "
                       "away to begin anew");
  }
  Manifest manifest;
  manifest.store = context_.config.store_id ? *context_.config.store_id : RandomStoreId();
  state_.space.SetFileBytes(MetaFile::kManifest, manifest.WriteTemporary(context_.env, context_.directory));
  Manifest::Install(context_.env, context_.directory);
  return manifest;
}

void Recovery::RemoveLeftovers(const std::vector<std::string>& names) {
  std::set<std::uint32_t> named;
  for (const CommitRecord& commit : state_.commits.kept) {
    for (const SegmentExtent& extent : commit.segments) named.insert(extent.number);
  }
  for (const char* temporary : {kManifestTemporaryName, kSnapshotTemporaryName, kReadCostTemporaryName}) {
    if (Contains(names, temporary)) context_.env.Remove(context_.PathOf(temporary));
  }
  for (const std::string& name : names) {
    const auto number = ParseSegmentName(name);
    if (!number) continue;
    state_.segments.SkipNumbersBelow(*number + 1);
    if (!named.contains(*number)) context_.env.Remove(context_.PathOf(name));
  }
}

// Returns nullptr when there is no commit yet.
const CommitRecord* Recovery::ChooseCommit() const {
  const CommitLog& commits = state_.commits;
  const std::uint64_t id = context_.config.at_commit;
  if (id == 0) return commits.kept.empty() ? nullptr : &commits.kept.back();
  const CommitRecord* const chosen = commits.Find(id);
  if (chosen == nullptr)
    throw InputError(context_.directory + ": commit " + std::to_string(id) + " is not kept");
  return chosen;
}

void Recovery::OpenSegments() {
  CommitLog& commits = state_.commits;
  const CommitRecord* const current = ChooseCommit();
  std::map<std::uint32_t, SegmentExtent> now;  // the current commit's segments
  for (const CommitRecord& commit : commits.kept)
    commits.next_history = std::max(commits.next_history, commit.history);
  if (current != nullptr) {
    commits.current_id = current->id;
    commits.current_history = current->history;
    commits.next_history = current == &commits.kept.back() ? current->history : commits.next_history + 1;
    commits.meta = current->meta;
    for (const SegmentExtent& extent : current->segments) now[extent.number] = extent;
  }
  const auto& opened = state_.segments.by_number();
  for (const CommitRecord& commit : commits.kept) {
    for (const SegmentExtent& extent : commit.segments) {
      if (!opened.contains(extent.number)) {
        CheckCall();
        const auto found = now.find(extent.number);
        state_.segments.Add(
            OpenSegment(found == now.end() ? SegmentExtent{extent.number, 0, false} : found->second));
      }
      Segment& segment = *state_.segments.At(extent.number);
      ++segment.pins;
      segment.pinned_slots = std::max(segment.pinned_slots, extent.slots);
    }
  }
  for (const auto& [row_bytes, row_class] : state_.rows.classes()) {
    row_class->GrowSegments(state_.space.NextSegmentBytes());
    const std::size_t count = row_class->segments.size();
    if (count << row_class->slot_bits > TableIndex::kMaxLocation) {
      throw InputError(context_.directory + ": the store holds more than 2^40 row versions of one size");
    }
  }
}

// A segment without slots is kept for other commits only.
SegmentPtr Recovery::OpenSegment(const SegmentExtent& extent) {
  auto segment = std::make_shared<Segment>();
  segment->number = extent.number;
  segment->path = context_.PathOf(SegmentName(extent.number));
  segment->file = context_.env.Open(segment->path, OpenMode::kUpdate, context_.config.direct);
  const SegmentHeader header = ReadSegmentHeader(*segment->file);
  if (header.store != context_.id || header.number != extent.number) {
    throw CorruptError(segment->path + ": the file belongs to another store or is another segment");
  }
  segment->relocated = header.relocated;
  segment->crc_prefix = RecordCrcPrefix(context_.id, extent.number);
  segment->file_bytes = segment->file->Size();
  state_.segments.SetReservedBytes(*segment, segment->file_bytes);
  RowClass& row_class = state_.rows.ClassFor(header.row_bytes);
  segment->row_class = &row_class;
  segment->sealed = !extent.appending;
  segment->slots = segment->capacity = segment->durable_slots = segment->flushed_slots = extent.slots;
  if (extent.slots == 0) {
    segment->retired = true;
    return segment;
  }
  if (segment->file_bytes < row_class.geometry.EndOffset(extent.slots)) {
    throw CorruptError(segment->path + ": the file is cut off at " + std::to_string(segment->file_bytes) +
                       " bytes; " + std::to_string(row_class.geometry.EndOffset(extent.slots)) +
                       " bytes are committed");
  }
  row_class.SetSlotBits(static_cast<unsigned>(std::bit_width(extent.slots - 1)),
                        context_.config.limits.locations);
  row_class.AppendSegment(segment);
  return segment;
}

// Goes on appending where the commit ended, unless a kept commit names more of the segment.
void Recovery::ResumeAppending(RowClass& row_class) {
  for (const SegmentPtr& segment : row_class.segments) {
    if (segment == nullptr || segment->sealed) continue;
    segment->sealed = true;
    if (context_.config.read_only) continue;
    if (segment->slots >= row_class.slots_per_segment || segment->pinned_slots > segment->slots) continue;
    Stream stream = segment->relocated ? kOfCommit : kFromCallers;
    if (segment->relocated && row_class.active[stream] != nullptr) stream = kSinceCommit;
    if (segment->live == 0 || row_class.active[stream] != nullptr) continue;
    const std::uint64_t end = row_class.geometry.EndOffset(segment->slots);
    Footer footer = LoadKeys(*segment, context_.id, 0);
    footer.keys.reserve(row_class.slots_per_segment);
    footer.keys.resize(segment->slots);
    if (segment->relocated) footer.epochs.resize(segment->slots);
    std::erase_if(footer.voids, [&](std::uint32_t slot) { return slot >= segment->slots; });
    segment->file->Truncate(end);
    segment->footer = std::move(footer);
    segment->sealed = false;
    segment->capacity = row_class.slots_per_segment;
    segment->file_bytes = end;
    state_.segments.SetReservedBytes(*segment, row_class.MaxSegmentBytes(segment->relocated));
    segment->stream = stream;
    row_class.active[stream] = segment;
  }
}

}  // namespace tierstore
