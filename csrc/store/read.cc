// Batched reads: look all rows up, copy those that are still in memory, read the others in the order of their
// positions, with blocks that are near one another in one request.
#include <algorithm>

#include "common/call_limit.h"
#include "common/key.h"
#include "io/aligned_buffer.h"
#include "io/errors.h"
#include "store/store.h"

namespace tierstore {
namespace {

constexpr std::size_t kRowsPerLookup = 1024;
constexpr int kYields = 64;  // until the mutex is taken all the same
// Where reading on costs less than another request, as long as it is not known for this device.
constexpr std::uint64_t kUsualMergeGap = 8 << 10;
// Reads are measured where there are so many rows to read, in so many bytes of files.
constexpr std::size_t kRowsToMeasure = 1024;
constexpr std::uint64_t kBytesToMeasure = 64 << 20;
// Rows that take so long to read that others should not wait for them.
constexpr std::size_t kRowsOfLargeRead = 1 << 14;

[[noreturn]] void ThrowDamaged(const Segment& segment, std::uint64_t offset, std::uint64_t key,
                               const char* why) {
  throw CorruptError(segment.path + ": the record at offset " + std::to_string(offset) + " (table " +
                     std::to_string(KeyTable(key)) + ", id " + std::to_string(KeyId(key)) +
                     ") is damaged: " + why);
}

// Copies the row out of a record that `size` bytes at `data` begin with.
void CopyRow(const Segment& segment, std::uint32_t slot, std::uint64_t key, const std::byte* data,
             std::size_t size, std::byte* row) {
  const Geometry& geometry = segment.row_class->geometry;
  const std::uint64_t offset = geometry.Offset(slot);
  if (size < geometry.record_bytes) ThrowDamaged(segment, offset, key, "the file ends before its end");
  if (!RecordIsIntact(data, slot, geometry, segment.crc_prefix)) {
    ThrowDamaged(segment, offset, key, "checksum mismatch");
  }
  if (LoadRecordHeader(data).key != key) ThrowDamaged(segment, offset, key, "it holds another key");
  std::memcpy(row, data + kRecordHeaderBytes, geometry.row_bytes);
}

// Counts while it lives.
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

// Rows that must come from files. The segments are held, so compaction may go on meanwhile.
struct Store::PendingRead {
  RowClass* row_class = nullptr;
  std::vector<std::uint64_t> items;  // location << 32 | position in the call; sorted: by place
  std::vector<SegmentPtr> segments;  // by ordinal, those of the items
};

// Wakes the compactor for the segments that it did not remove because of a read.
struct Store::ReadEnd {
  Store& store;
  ~ReadEnd() {
    if (!store.removal_waits_) return;
    const Lock lock(store.mutex_);
    store.WakeCompactor();
  }
};

void Store::Read(std::span<const std::uint64_t> keys, std::byte* rows, std::uint32_t row_bytes, bool* found) {
  const ReadEnd end{*this};  // comes after the segments are let go
  PendingRead pending;
  Locate(keys, rows, row_bytes, found, pending);
  if (const std::size_t n = pending.items.size(); n > 0) {
    ReadLane& lane = PickLane(n);
    const Counted queued(lane.rows, n);
    const Counted read(reads_, 1);
    const auto reading = LockInCall(lane.mutex);
    CheckOpen();
    if (lane.reader == nullptr) lane.reader = env_.NewBatchReader(config_.read_engine, config_.queue_depth);
    if (merge_gap_bytes_ == 0 && n >= kRowsToMeasure && &lane == &lanes_[0])
      MeasureReads(*lane.reader, pending);
    Fetch(*lane.reader, pending, keys, rows);
  }
  read_rows_ += static_cast<std::uint64_t>(std::count(found, found + keys.size(), true));
}

// Takes the mutex, after reads that wait for it: it would be taken again before they have woken up.
void Store::LockAfterReads(Lock& lock) {
  for (int i = 0; reads_waiting_ > 0 && i < kYields; ++i) std::this_thread::yield();
  lock.lock();
}

// Lets reads that wait for the mutex go first.
void Store::GiveWay(Lock& lock) {
  if (reads_waiting_ == 0) return;
  lock.unlock();
  LockAfterReads(lock);
}

Store::ReadLane& Store::PickLane(std::size_t rows) {
  return rows < kRowsOfLargeRead && lanes_[1].rows < lanes_[0].rows ? lanes_[1] : lanes_[0];
}

// Where the rows are; copies those that are in memory. Others may use the store between some rows and the
// next.
void Store::Locate(std::span<const std::uint64_t> keys, std::byte* rows, std::uint32_t row_bytes, bool* found,
                   PendingRead& pending) {
  CheckOpen();
  ++reads_waiting_;
  Lock lock(mutex_);
  --reads_waiting_;
  CheckOpen();
  bool may_release = true;
  for (std::size_t at = 0; at < keys.size();) {
    std::size_t n = 1;
    while (at + n < keys.size() && n < kRowsPerLookup && KeyTable(keys[at + n]) == KeyTable(keys[at])) ++n;
    if (!Resolve(keys.subspan(at, n), rows, row_bytes, found + at, at, pending)) {
      pending = PendingRead{};
      may_release = false;
      at = 0;
      continue;
    }
    at += n;
    if (may_release) GiveWay(lock);
    CheckOpen();
    CheckCall();
  }
}

// Once per store. A failure costs only the knowledge.
void Store::MeasureReads(BatchReader& reader, const PendingRead& pending) try {
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
  if (config_.read_only) return;
  {
    Lock lock(mutex_);
    if (UsedBytes() + kBlockBytes + SpaceReserve() > config_.cap_bytes) return;
    read_cost_bytes_ = kBlockBytes;
  }
  cost.Save(env_, directory_);
} catch (const IoError&) {
  // The next opening removes what is left of the file.
}

// Keys of one table, from position `base` of the call on. False when a segment of the rows before has given
// its ordinal to another one, so that all must be looked up again.
bool Store::Resolve(std::span<const std::uint64_t> keys, std::byte* rows, std::uint32_t row_bytes,
                    bool* found, std::size_t base, PendingRead& pending) {
  const std::uint32_t number = KeyTable(keys[0]);
  if (FindTable(number) == nullptr) {
    std::fill_n(found, keys.size(), false);
    return true;
  }
  const Table& table = TableFor(number, row_bytes);
  RowClass& row_class = *table.row_class;
  pending.row_class = &row_class;
  pending.segments.resize(row_class.segments.size());
  std::uint32_t locations[kRowsPerLookup];
  table.index.Find(keys.data(), keys.size(), locations);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    found[i] = locations[i] != TableIndex::kAbsent;
    if (!found[i]) continue;
    const SegmentPtr& segment = row_class.SegmentOf(locations[i]);
    if (!segment->chunks.empty()) {
      const std::uint64_t offset = row_class.geometry.Offset(row_class.SlotOf(locations[i]));
      if (const Chunk* chunk = segment->ChunkAt(offset)) {
        std::memcpy(rows + (base + i) * row_bytes,
                    chunk->buffer.data() + (offset - chunk->offset) + kRecordHeaderBytes, row_bytes);
        continue;
      }
    }
    SegmentPtr& held = pending.segments[segment->ordinal];
    if (held == nullptr) held = segment;
    if (held != segment) return false;
    pending.items.push_back(std::uint64_t{locations[i]} << 32 | (base + i));
  }
  return true;
}

void Store::Fetch(BatchReader& reader, PendingRead& pending, std::span<const std::uint64_t> keys,
                  std::byte* rows) {
  std::sort(pending.items.begin(), pending.items.end());
  CheckCall();
  const RowClass& row_class = *pending.row_class;
  const Geometry& geometry = row_class.geometry;
  const auto segment_of = [&](std::uint64_t item) -> const Segment& {
    return *pending.segments[static_cast<std::uint32_t>(item >> 32) >> row_class.slot_bits];
  };
  const auto slot_of = [&](std::uint64_t item) {
    return row_class.SlotOf(static_cast<std::uint32_t>(item >> 32));
  };

  const std::uint64_t measured = merge_gap_bytes_, merge_gap = measured != 0 ? measured : kUsualMergeGap;
  std::vector<ReadRequest> requests;
  std::vector<std::size_t> first;  // item of each request
  for (std::size_t i = 0; i < pending.items.size(); ++i) {
    File* const file = segment_of(pending.items[i]).file.get();
    const std::uint64_t offset = geometry.Offset(slot_of(pending.items[i]));
    const std::uint64_t begin = offset / kBlockBytes * kBlockBytes;
    const std::uint64_t end = (offset + geometry.record_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    if (!requests.empty()) {
      ReadRequest& last = requests.back();
      if (last.file == file && begin <= last.offset + last.size + merge_gap &&
          end - last.offset <= kMaxReadBytes) {
        last.size = std::max(last.size, static_cast<std::uint32_t>(end - last.offset));
        continue;
      }
    }
    requests.push_back({file, begin, static_cast<std::uint32_t>(end - begin)});
    first.push_back(i);
  }
  first.push_back(pending.items.size());

  const auto deliver = [&](std::size_t request, const std::byte* data, std::size_t size) {
    for (std::size_t i = first[request]; i < first[request + 1]; ++i) {
      const std::uint64_t item = pending.items[i];
      const auto position = static_cast<std::uint32_t>(item);
      const std::size_t at =
          std::min<std::size_t>(geometry.Offset(slot_of(item)) - requests[request].offset, size);
      CopyRow(segment_of(item), slot_of(item), keys[position], data + at, size - at,
              rows + std::size_t{position} * geometry.row_bytes);
    }
  };
  if (geometry.record_bytes + kBlockBytes > kMaxReadBytes) {
    // Rows so large that each is a request of its own, too large for the reader's buffers.
    AlignedBuffer buffer(geometry.record_bytes + 2 * kBlockBytes);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      CheckCall();
      deliver(i, buffer.data(), requests[i].file->Read(requests[i].offset, buffer.data(), requests[i].size));
    }
  } else {
    reader.Read(requests, deliver);
  }
  read_requests_ += requests.size();
  for (const ReadRequest& request : requests) read_bytes_ += request.size;
}

}  // namespace tierstore
