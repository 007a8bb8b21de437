#include "store/store.h"

#include <unistd.h>

#include <algorithm>
#include <bit>

#include "common/call_limit.h"
#include "common/fork.h"
#include "common/key.h"

namespace tierstore {
namespace {

constexpr std::uint64_t kMinSegmentBytes = 128 << 10;
constexpr std::uint64_t kSegmentsPerCap = 128;  // so fine that those half filled or kept free hardly matter
constexpr std::uint32_t kRowsPerSpan = 256;
// At the end a snapshot is worth more: the next opening gains, and nothing waits.
constexpr double kSnapshotLagAtClose = 1.5;
constexpr std::size_t kMaxTables = std::size_t{1} << (64 - kIdBits);

}  // namespace

Store::Store(Env& env, std::string directory, const StoreConfig& config,
             const std::vector<std::pair<std::uint32_t, std::uint32_t>>& tables)
    : env_(env),
      directory_(std::move(directory)),
      config_(config),
      pid_(getpid()),
      queue_(mutex_, config.write_buffer_bytes, reads_,
             [this](const SegmentPtr& segment) { RetireIfDead(segment); }) {
  cap_bytes_ = config_.cap_bytes;
  segment_bytes_ = config_.segment_bytes != 0
                       ? std::min(config_.segment_bytes, kMaxSegmentBytes)
                       : std::clamp(config_.cap_bytes / kSegmentsPerCap, kMinSegmentBytes, kMaxSegmentBytes);
  lanes_[0].reader = env_.NewBatchReader(config_.read_engine, config_.queue_depth);
  Recover(tables);
  if (!config_.read_only) compactor_ = std::thread([this] { CompactLoop(); });
}

Store::~Store() { Close(); }

bool Store::InOwnProcess() const { return getpid() == pid_ && fork_count_ == ForkCount(); }

void Store::Close() {
  if (!InOwnProcess()) return;
  closed_ = true;
  const std::lock_guard closing(closing_);
  Lock lock(mutex_);
  stop_ = true;
  saved_.notify_all();
  compactor_work_.notify_all();
  space_.notify_all();
  queue_.Stop(lock);  // calls that wait for it throw
  lock.unlock();
  compaction_resumed_.notify_all();
  std::lock_guard call(call_);
  std::scoped_lock reads(lanes_[0].mutex, lanes_[1].mutex);
  if (compactor_.joinable()) compactor_.join();
  lock.lock();
  if (!config_.read_only && !changed_ && !segments_.empty() && SnapshotIsDue(kSnapshotLagAtClose)) {
    std::vector<const TableIndex*> indexes;
    const SnapshotHeader header = CaptureSnapshot(indexes);
    WriteSnapshot(lock, header, indexes);
  }
  for (auto& [number, segment] : segments_) segment->file.reset();
  segments_.clear();
  doomed_.clear();
  classes_.clear();
  tables_.clear();
  for (ReadLane& lane : lanes_) lane.reader.reset();
}

void Store::CheckOpen() const {
  if (closed_) throw ClosedError("the store is closed");
  if (!InOwnProcess()) {
    throw ClosedError(
        "the store was opened before this process was forked; open it in the process that uses it");
  }
}

// Excludes other calls. In a forked child the mutex may be locked for ever, so the check comes first.
std::unique_lock<std::timed_mutex> Store::BeginCall() {
  CheckOpen();
  return LockInCall(call_);
}

void Store::CheckWritable() const {
  CheckOpen();
  if (config_.read_only) throw InputError(directory_ + ": the store is opened read-only");
}

RowClass& Store::ClassFor(std::uint32_t row_bytes) {
  auto& slot = classes_[row_bytes];
  if (slot == nullptr) {
    slot = std::make_unique<RowClass>();
    slot->geometry = Geometry::For(row_bytes);
    slot->slots_per_segment = slot->geometry.SlotsIn(segment_bytes_);
    if (segment_bytes_ == kMaxSegmentBytes) {  // locations count in powers of two: waste none of them
      const std::uint32_t frame = slot->geometry.records_per_frame;
      slot->slots_per_segment = std::max(1u, std::bit_floor(slot->slots_per_segment) / frame) * frame;
    }
    slot->SetSlotBits(static_cast<unsigned>(std::bit_width(slot->slots_per_segment - 1)),
                      config_.limits.locations);
    const std::uint32_t frame_bytes = slot->geometry.frame_bytes;
    const std::size_t frames = std::max<std::size_t>(1, config_.limits.chunk_bytes / frame_bytes);
    slot->slots_per_chunk = static_cast<std::uint32_t>(frames) * slot->geometry.records_per_frame;
    slot->chunk_bytes = frames * frame_bytes;
  }
  return *slot;
}

Store::Table& Store::TableFor(std::uint32_t table, std::uint32_t row_bytes) {
  if (row_bytes == 0 || row_bytes > kMaxRowBytes) {
    throw InputError("rows of " + std::to_string(row_bytes) + " bytes cannot be stored; 1 to " +
                     std::to_string(kMaxRowBytes) + " can");
  }
  if (table >= kMaxTables) throw InputError("table " + std::to_string(table) + " is not below 65536");
  if (table >= tables_.size()) tables_.resize(table + 1);
  auto& entry = tables_[table];
  if (entry == nullptr) entry.reset(new Table{&ClassFor(row_bytes), {}});
  const std::uint32_t expected = entry->row_class->geometry.row_bytes;
  if (expected != row_bytes) {
    throw InputError("table " + std::to_string(table) + " has rows of " + std::to_string(expected) +
                     " bytes, not " + std::to_string(row_bytes));
  }
  return *entry;
}

void Store::Write(std::span<const std::uint64_t> keys, const std::byte* rows, std::uint32_t row_bytes,
                  std::size_t* stored) {
  if (stored != nullptr) *stored = 0;
  const auto call = BeginCall();
  CheckWritable();
  Lock lock(mutex_);
  queue_.ThrowPending();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i == 0 || KeyTable(keys[i]) != KeyTable(keys[i - 1])) TableFor(KeyTable(keys[i]), row_bytes);
  }
  if (keys.empty()) return;
  RowClass& row_class = ClassFor(row_bytes);
  std::byte* records[kRowsPerSpan];
  std::uint32_t epochs[kRowsPerSpan], locations[kRowsPerSpan];
  for (std::size_t at = 0; at < keys.size();) {
    CheckCall();
    const auto want = static_cast<std::uint32_t>(std::min<std::size_t>(keys.size() - at, kRowsPerSpan));
    const Span span = Reserve(lock, row_class, kFromCallers, want);
    lock.unlock();  // only calls append to this segment, and only one call is under way
    LocateRecords(span, records);
    for (std::uint32_t i = 0; i < span.count; ++i) {
      epochs[i] = span.segment->number;
      locations[i] = row_class.Location(*span.segment, span.first + i);
      std::memcpy(records[i] + kRecordHeaderBytes, rows + (at + i) * row_bytes, row_bytes);
    }
    SealRecords(records, &keys[at], epochs, span.first, span.count, row_class.geometry,
                span.segment->crc_prefix);
    LockAfterReads(lock);
    Advance(span, span.count, &keys[at], nullptr);
    Put(&keys[at], locations, span.count, row_class, /*relocated=*/false);
    written_rows_ += span.count;
    at += span.count;
    if (stored != nullptr) *stored = at;
  }
}

void Store::Expect(std::uint32_t table, std::uint32_t row_bytes, std::uint64_t rows) {
  const auto call = BeginCall();
  CheckWritable();
  Lock lock(mutex_);
  TableFor(table, row_bytes).index.Reserve(rows);
}

std::uint64_t Store::Keys(std::uint32_t table, std::uint64_t cursor, std::size_t limit,
                          std::vector<std::uint64_t>& keys) {
  const auto call = BeginCall();
  CheckOpen();
  Lock lock(mutex_);
  queue_.ThrowPending();
  const Table* entry = FindTable(table);
  if (entry == nullptr) return TableIndex::kEnd;
  if (!entry->index.IsCurrent(cursor)) {
    throw InputError("rows of table " + std::to_string(table) +
                     " were written while its keys were listed, which changed their order; list them anew");
  }
  const std::size_t before = keys.size();
  cursor = entry->index.List(cursor, limit, keys, nullptr);
  for (std::size_t i = before; i < keys.size(); ++i) keys[i] = MakeKey(table, keys[i]);
  return cursor;
}

StoreCounters Store::Stats() {
  CheckOpen();
  Lock lock(mutex_);
  CheckOpen();
  StoreCounters counters;
  for (const auto& table : tables_) {
    if (table == nullptr) continue;
    counters.rows += table->index.size();
    counters.live_bytes += table->index.size() * table->row_class->geometry.row_bytes;
    counters.index_bytes += table->index.bytes();
  }
  counters.disk_bytes = manifest_bytes_ + snapshot_bytes_ + read_cost_bytes_;
  counters.snapshot_failures = snapshot_failures_;
  counters.rebuilt_rows = rebuilt_rows_;
  for (const auto& [number, segment] : segments_) {
    counters.disk_bytes += segment->file_bytes;
    if (segment->retired) counters.kept_bytes += segment->file_bytes;
    counters.buffer_bytes += segment->footer.keys.capacity() * 8 + segment->footer.epochs.capacity() * 4 +
                             segment->kept_bits.capacity() * 8;
  }
  counters.buffer_bytes += queue_.memory_bytes();
  counters.segments = segments_.size();
  counters.read_rows = read_rows_;
  counters.read_bytes = read_bytes_;
  counters.read_requests = read_requests_;
  counters.written_rows = written_rows_;
  counters.written_bytes = queue_.written_bytes() + manifest_bytes_written_ + snapshot_bytes_written_;
  counters.relocated_rows = relocated_rows_;
  counters.renewed_commits = renewed_commits_;
  counters.io = lanes_[0].reader->name();
  counters.direct = !segments_.empty() && segments_.rbegin()->second->file->IsDirect();
  counters.merge_gap_bytes = merge_gap_bytes_;
  return counters;
}

}  // namespace tierstore
