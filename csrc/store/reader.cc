#include "store/reader.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/call_limit.h"
#include "common/key.h"
#include "io/aligned_buffer.h"
#include "io/errors.h"
#include "store/errors.h"
#include "store/prefetch.h"
#include "store/read_cost.h"

namespace tierstore {
namespace {

constexpr std::size_t kRowsPerLookup = 1024;
// Up to this gap reading on costs less than another request, as long as the device was not measured.
constexpr std::uint64_t kUsualMergeGap = 8 << 10;
// Reads are measured when a call reads at least this many rows, from at least this many bytes of files.
constexpr std::size_t kRowsToMeasure = 1024;
constexpr std::uint64_t kBytesToMeasure = 64 << 20;
// Lane i is for reads of fewer rows than kRowsOfLane[i]; the first lane is for all reads.
constexpr std::size_t kRowsOfLane[] = {~std::size_t{0}, 1 << 14, 1 << 11};

[[noreturn]] void ThrowDamaged(const Segment& segment, std::uint64_t offset, std::uint64_t key,
                               const char* why) {
  throw CorruptError(segment.path + ": the record at offset " + std::to_string(offset) + " (table " +
                     std::to_string(KeyTable(key)) + ", id " + std::to_string(KeyId(key)) +
                     ") is damaged: " + why + "; `tierstore verify` says what is lost and what to do");
}

// Copies the row out of the record that begins at `data`, where `size` bytes are.
void CopyRow(const Segment& segment, std::uint32_t slot, std::uint64_t key, const std::byte* data,
             std::size_t size, std::byte* row) {
  const Geometry& geometry = segment.row_class->geometry;
  const std::uint64_t offset = geometry.Offset(slot);
  if (size < geometry.record_bytes) ThrowDamaged(segment, offset, key, "the file ends before its end");
  if (!RecordIsIntact(data, slot, geometry, segment.crc_prefix)) {
    ThrowDamaged(segment, offset, key, "checksum mismatch");
  }
  if (LoadRecordHeader(data).key != key) ThrowDamaged(segment, offset, key, "the record holds another key");
  std::memcpy(row, data + kRecordHeaderBytes, geometry.row_bytes);
}

// Counts one more while the object lives.
template <typename T>
class Counted {
 public:
  Counted(std::atomic<T>& count, T n) : count_(count), n_(n) { count_ += n_; }
  ~Counted() { count_ -= n_; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  std::atomic<T>& count_;
  const T n_;
};

}  // namespace

// Pending has the rows that must come from files. It holds each segment until the segment's rows have
// arrived, so compaction may go on meanwhile.
struct Reader::Pending {
  RowClass* row_class = nullptr;
  std::vector<std::uint64_t> items;  // location << kPositionBits | position; sorted: by place
  std::vector<SegmentPtr> segments;  // the items' segments, by ordinal

  std::size_t OrdinalOf(std::uint64_t item) const { return item >> kPositionBits >> row_class->slot_bits; }
  const Segment& SegmentOf(std::uint64_t item) const { return *segments[OrdinalOf(item)]; }
  std::uint32_t SlotOf(std::uint64_t item) const { return row_class->SlotOf(item >> kPositionBits); }
  static std::size_t PositionOf(std::uint64_t item) { return item & (kMostKeysAtOnce - 1); }
};

// Requests says what to read for sorted items: items first[i] to first[i + 1] lie in list[i].
struct Reader::Requests {
  std::vector<ReadRequest> list;
  std::vector<std::size_t> first;
  std::vector<std::size_t> left;  // by ordinal: the segment's requests that have not arrived

  Requests(const Pending& pending, std::uint64_t merge_gap);
};

struct Reader::End {
  Reader& reader;
  ~End() { reader.WakeCompactor(); }
};

Reader::Reader(const StoreContext& context, StoreMutex& mutex, StoreState& state, CompactorControl& control,
               std::atomic<int>& reads)
    : context_(context), mutex_(mutex), state_(state), control_(control), reads_(reads) {
  lanes_[0].reader = context.env.NewBatchReader(context.config.read_engine, context.config.queue_depth);
}

void Reader::Read(std::span<const std::uint64_t> keys, const ReadTarget& target, bool* found) {
  context_.CheckOpen();
  const std::size_t most = context_.config.limits.keys_at_once;
  for (std::size_t at = 0; at < keys.size(); at += most)
    ReadSome(keys.subspan(at, std::min(most, keys.size() - at)), target.From(at), found + at);
}

void Reader::ReadSome(std::span<const std::uint64_t> keys, const ReadTarget& target, bool* found) {
  const End end{*this};  // comes after all segments are let go
  Pending pending;
  Locate(keys, target, found, pending);
  if (const std::size_t n = pending.items.size(); n > 0) {
    Lane& lane = PickLane(n);
    const Counted queued(lane.rows, n);
    const Counted read(reads_, 1);
    const auto reading = LockInCall(lane.mutex);
    context_.CheckOpen();
    const StoreConfig& config = context_.config;
    if (lane.reader == nullptr)
      lane.reader = context_.env.NewBatchReader(config.read_engine, config.queue_depth);
    if (merge_gap_bytes_ == 0 && n >= kRowsToMeasure && &lane == &lanes_[0]) Measure(*lane.reader, pending);
    Fetch(*lane.reader, pending, keys, target);
  }
  read_rows_ += static_cast<std::uint64_t>(std::count(found, found + keys.size(), true));
}

// Wakes the compactor if it did not remove some segments because of a read. Call this function when a segment
// has been let go.
void Reader::WakeCompactor() {
  if (!state_.segments.removal_waits()) return;
  const Lock lock = mutex_.LockForRead();
  control_.Wake();
}

Reader::Lane& Reader::PickLane(std::size_t rows) {
  std::size_t best = 0;
  for (std::size_t lane = 1; lane < std::size(lanes_) && rows < kRowsOfLane[lane]; ++lane) {
    if (lanes_[lane].rows < lanes_[best].rows) best = lane;
  }
  return lanes_[best];
}

void Reader::Places(std::span<const std::uint64_t> keys, std::uint64_t* places) {
  Location locations[kRowsPerLookup];
  for (std::size_t at = 0; at < keys.size(); at += kRowsPerLookup) {
    const std::size_t n = std::min(keys.size() - at, kRowsPerLookup);
    const Lock lock = mutex_.LockForRead();
    context_.CheckOpen();
    state_.rows.Find(&keys[at], n, locations, nullptr);
    for (std::size_t i = 0; i < n; ++i) {
      const RowIndex::Table* const table = state_.rows.FindTable(KeyTable(keys[at + i]));
      places[at + i] =
          locations[i] == TableIndex::kAbsent ? kNowhere : table->row_class->PlaceOf(locations[i]);
    }
  }
}

// Finds the rows, and copies rows that are in memory. Other calls may use the store between a thousand rows
// and the next.
void Reader::Locate(std::span<const std::uint64_t> keys, const ReadTarget& target, bool* found,
                    Pending& pending) {
  context_.CheckOpen();
  Lock lock = mutex_.LockForRead();
  context_.CheckOpen();
  bool may_release = true;
  for (std::size_t at = 0; at < keys.size();) {
    const std::size_t n = std::min(keys.size() - at, kRowsPerLookup);
    if (!Resolve(keys.subspan(at, n), target, found + at, at, pending)) {
      pending = Pending{};
      may_release = false;
      at = 0;
      continue;
    }
    at += n;
    if (may_release) mutex_.GiveWay(lock);
    context_.CheckOpen();
    CheckCall();
  }
}

// Measures the device, once per store. After a failure the usual gap stays.
void Reader::Measure(BatchReader& reader, const Pending& pending) try {
  std::vector<File*> files;
  std::uint64_t bytes = 0;
  for (const SegmentPtr& segment : pending.segments) {
    if (segment == nullptr) continue;
    const std::uint64_t size = segment->file->Size();
    if (size < ReadCost::kSizes.back()) continue;
    files.push_back(segment->file.get());
    bytes += size;
  }
  if (bytes < kBytesToMeasure) return;
  const ReadCost cost = ReadCost::Measure(reader, files);
  merge_gap_bytes_ = cost.MergeGap();
  if (context_.config.read_only) return;
  {
    const Lock lock(mutex_);
    if (!state_.space.Fits(kBlockBytes)) return;
    state_.space.SetFileBytes(MetaFile::kReadCost, kBlockBytes);
  }
  cost.Save(context_.env, context_.directory);
} catch (const IoError&) {
  // The next opening removes the file.
}

// Looks up at most kRowsPerLookup keys, from position `base` of the call on. Returns false when a segment of
// the rows before has given its ordinal to another segment, so that all rows must be looked up again.
bool Reader::Resolve(std::span<const std::uint64_t> keys, const ReadTarget& target, bool* found,
                     std::size_t base, Pending& pending) {
  RowClass* of_tables = nullptr;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::uint32_t table = KeyTable(keys[i]);
    if (i > 0 && table == KeyTable(keys[i - 1])) continue;
    if (state_.rows.FindTable(table) != nullptr)
      of_tables = state_.rows.TableFor(table, target.row_bytes).row_class;
  }
  if (of_tables == nullptr) {
    std::fill_n(found, keys.size(), false);
    return true;
  }
  RowClass& row_class = *of_tables;
  pending.row_class = &row_class;
  pending.segments.resize(row_class.segments.size());
  Location locations[kRowsPerLookup];
  state_.rows.Find(keys.data(), keys.size(), locations, &row_class);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    found[i] = locations[i] != TableIndex::kAbsent;
    if (!found[i]) continue;
    const SegmentPtr& segment = row_class.SegmentOf(locations[i]);
    if (!segment->chunks.empty()) {
      const std::uint64_t offset = row_class.geometry.Offset(row_class.SlotOf(locations[i]));
      if (const Chunk* chunk = segment->ChunkAt(offset)) {
        std::memcpy(target.At(base + i), chunk->buffer.data() + (offset - chunk->offset) + kRecordHeaderBytes,
                    target.row_bytes);
        continue;
      }
    }
    SegmentPtr& held = pending.segments[segment->ordinal];
    if (held == nullptr) held = segment;
    if (held != segment) return false;
    pending.items.push_back(locations[i] << kPositionBits | (base + i));
  }
  return true;
}

Reader::Requests::Requests(const Pending& pending, std::uint64_t merge_gap) : left(pending.segments.size()) {
  const Geometry& geometry = pending.row_class->geometry;
  std::uint64_t stretch_end = 0;  // of the last request's file
  for (std::size_t i = 0; i < pending.items.size(); ++i) {
    File* const file = pending.SegmentOf(pending.items[i]).file.get();
    const std::uint64_t offset = geometry.Offset(pending.SlotOf(pending.items[i]));
    const std::uint64_t begin = offset / kBlockBytes * kBlockBytes;
    const std::uint64_t end = (offset + geometry.record_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    if (!list.empty()) {
      ReadRequest& last = list.back();
      if (last.file == file && begin <= last.offset + last.size + merge_gap &&
          end - last.offset <= kMaxReadBytes && end <= stretch_end) {
        last.size = std::max(last.size, static_cast<std::uint32_t>(end - last.offset));
        continue;
      }
    }
    list.push_back({file, begin, static_cast<std::uint32_t>(end - begin)});
    first.push_back(i);
    ++left[pending.OrdinalOf(pending.items[i])];
    stretch_end = file->EndOfStretch(begin);
  }
  first.push_back(pending.items.size());
}

void Reader::Fetch(BatchReader& reader, Pending& pending, std::span<const std::uint64_t> keys,
                   const ReadTarget& target) {
  std::sort(pending.items.begin(), pending.items.end());
  CheckCall();
  const Geometry& geometry = pending.row_class->geometry;
  const std::uint64_t measured = merge_gap_bytes_;
  Requests requests(pending, measured != 0 ? measured : kUsualMergeGap);
  const auto deliver = [&](std::size_t number, const std::byte* data, std::size_t size) {
    const ReadRequest& request = requests.list[number];
    const std::size_t first = requests.first[number], end = requests.first[number + 1];
    const auto begin_of = [&](std::size_t i) {
      return std::min<std::size_t>(geometry.Offset(pending.SlotOf(pending.items[i])) - request.offset, size);
    };
    const auto prefetch = [&](std::size_t i) {
      const std::size_t at = begin_of(i);
      Prefetch<false>(data + at, std::min<std::size_t>(geometry.record_bytes, size - at));
      Prefetch<true>(target.At(Pending::PositionOf(pending.items[i])), geometry.row_bytes);
    };
    for (std::size_t i = first; i < std::min(first + kPrefetch, end); ++i) prefetch(i);
    for (std::size_t i = first; i < end; ++i) {
      if (i + kPrefetch < end) prefetch(i + kPrefetch);
      const std::uint64_t item = pending.items[i];
      const std::uint32_t slot = pending.SlotOf(item);
      const std::size_t position = Pending::PositionOf(item);
      const std::size_t at = begin_of(i);
      CopyRow(pending.SegmentOf(item), slot, keys[position], data + at, size - at, target.At(position));
    }
    // A writer may wait for the removal of this segment: it need not wait for the rows of others.
    const std::size_t ordinal = pending.OrdinalOf(pending.items[first]);
    if (--requests.left[ordinal] > 0) return;
    pending.segments[ordinal].reset();
    WakeCompactor();
  };
  if (geometry.record_bytes + kBlockBytes > kMaxReadBytes) {
    // Rows so large that each is a request of its own, too large for the reader's buffers.
    AlignedBuffer buffer(geometry.record_bytes + 2 * kBlockBytes);
    for (std::size_t i = 0; i < requests.list.size(); ++i) {
      const ReadRequest& request = requests.list[i];
      CheckCall();
      deliver(i, buffer.data(), request.file->Read(request.offset, buffer.data(), request.size));
    }
  } else {
    reader.Read(requests.list, deliver);
  }
  read_requests_ += requests.list.size();
  for (const ReadRequest& request : requests.list) read_bytes_ += request.size;
}

}  // namespace tierstore
