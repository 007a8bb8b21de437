#include "store/store.h"

#include <algorithm>
#include <cstring>

#include "common/call_limit.h"
#include "common/key.h"
#include "store/errors.h"
#include "store/prefetch.h"
#include "store/recovery.h"

namespace tierstore {
namespace {

constexpr std::uint32_t kRowsPerSpan = 256;

}  // namespace

Store::Store(Env& env, std::string directory, const StoreConfig& config,
             const std::vector<std::pair<std::uint32_t, std::uint32_t>>& tables)
    : context_(env, std::move(directory), config),
      state_(context_, control_),
      queue_(mutex_, config.write_buffer_bytes, env.Devices(), reads_,
             [this](const SegmentPtr& segment) { state_.segments.RetireIfDead(segment); }),
      appender_(context_, state_, queue_, control_),
      snapshots_(context_, mutex_, state_, queue_),
      committer_(context_, state_, appender_, snapshots_, queue_),
      reader_(context_, mutex_, state_, control_, reads_),
      compactor_(mutex_, state_, appender_, committer_, queue_, control_) {
  Recovery(context_, state_, reader_, snapshots_, committer_).Run(mutex_, tables);
  if (!config.read_only) compactor_.Start();
}

Store::~Store() { Close(); }

void Store::Close() {
  if (!InOwnProcess()) return;
  context_.MarkClosed();
  const std::lock_guard closing(closing_);
  Lock lock(mutex_);
  control_.Stop();
  committer_.Stop();
  queue_.Stop(lock);  // calls that wait for the queue throw
  snapshots_.Stop();
  lock.unlock();
  const std::lock_guard call(call_);
  const std::lock_guard no_scan(scanning_);
  const auto no_reads = reader_.Exclude();
  compactor_.Join();
  snapshots_.Join();
  lock.lock();
  try {
    if (!context_.config.read_only) state_.segments.RemoveDoomed(lock, queue_);
  } catch (...) {  // the next opening removes them
  }
  const bool as_committed = !state_.rows.changed() && !state_.segments.by_number().empty();
  if (!context_.config.read_only && as_committed) snapshots_.SaveAtClose(lock);
  state_.segments.Clear();
  state_.rows.Clear();
  reader_.Close();
}

// Excludes other calls. In a forked child the mutex may be locked for ever, so the check comes first.
std::unique_lock<std::timed_mutex> Store::BeginCall() {
  context_.CheckOpen();
  return LockInCall(call_);
}

void Store::Read(std::span<const std::uint64_t> keys, const ReadTarget& target, bool* found) {
  reader_.Read(keys, target, found);
}

void Store::Places(std::span<const std::uint64_t> keys, std::uint64_t* places) {
  reader_.Places(keys, places);
}

void Store::Write(std::span<const std::uint64_t> keys, const std::byte* rows, std::uint32_t row_bytes,
                  const std::int32_t* slots, std::size_t* stored) {
  if (stored != nullptr) *stored = 0;
  const auto call = BeginCall();
  context_.CheckWritable();
  Lock lock = mutex_.LockForCall();
  queue_.ThrowPending();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i == 0 || KeyTable(keys[i]) != KeyTable(keys[i - 1]))
      state_.rows.TableFor(KeyTable(keys[i]), row_bytes);
  }
  if (keys.empty()) return;
  RowClass& row_class = state_.rows.ClassFor(row_bytes);
  std::byte* records[kRowsPerSpan];
  std::uint32_t epochs[kRowsPerSpan];
  Location locations[kRowsPerSpan];
  const auto row_of = [&](std::size_t i) {
    return rows + (slots == nullptr ? i : static_cast<std::size_t>(slots[i])) * row_bytes;
  };
  for (std::size_t at = 0; at < keys.size();) {
    CheckCall();
    const auto want = static_cast<std::uint32_t>(std::min<std::size_t>(keys.size() - at, kRowsPerSpan));
    const Span span = appender_.Reserve(lock, row_class, kFromCallers, want);
    lock.unlock();  // only calls append to this segment, and only one call is under way
    span.LocateRecords(records);
    for (std::uint32_t i = 0; i < span.count; ++i) {
      epochs[i] = span.segment->number;
      locations[i] = row_class.LocationOf(*span.segment, span.first + i);
      if (at + i + kPrefetch < keys.size()) Prefetch<false>(row_of(at + i + kPrefetch), row_bytes);
      std::memcpy(records[i] + kRecordHeaderBytes, row_of(at + i), row_bytes);
    }
    SealRecords(records, &keys[at], epochs, span.first, span.count, row_class.geometry,
                span.segment->crc_prefix);
    mutex_.LockAfterReads(lock);
    appender_.Advance(span, span.count, &keys[at], nullptr);
    state_.rows.Put(&keys[at], locations, span.count, row_class, /*relocated=*/false);
    written_rows_ += span.count;
    at += span.count;
    if (stored != nullptr) *stored = at;
  }
}

void Store::Reserve(std::uint32_t table, std::uint32_t row_bytes, std::uint64_t rows) {
  const auto call = BeginCall();
  context_.CheckWritable();
  const Lock lock(mutex_);
  state_.rows.TableFor(table, row_bytes).index.Reserve(rows);
}

bool Store::NextKeys(KeyList& list, std::size_t limit, std::vector<std::uint64_t>& keys) {
  const auto call = BeginCall();
  context_.CheckOpen();
  const Lock lock(mutex_);
  queue_.ThrowPending();
  RowIndex::Table* const entry = state_.rows.FindTable(list.table);
  if (entry == nullptr) return false;
  const std::size_t before = keys.size();
  const bool more = entry->index.List(list.ids, limit, keys, nullptr);
  for (std::size_t i = before; i < keys.size(); ++i) keys[i] = MakeKey(list.table, keys[i]);
  return more;
}

std::uint64_t Store::Count(std::uint32_t table) {
  context_.CheckOpen();
  const Lock lock(mutex_);
  context_.CheckOpen();
  const RowIndex::Table* const entry = state_.rows.FindTable(table);
  return entry == nullptr ? 0 : entry->index.size();
}

std::unique_ptr<Scan> Store::BeginScan(const std::vector<std::uint32_t>& tables) {
  context_.CheckOpen();
  return std::make_unique<Scan>(context_, mutex_, state_, control_, reader_, tables);
}

std::vector<ScanBatch> Store::Next(Scan& scan) {
  context_.CheckOpen();
  const auto scanning = LockInCall(scanning_);
  return scan.Next();
}

std::uint64_t Store::Commit(std::string meta, std::string tag) {
  const auto call = BeginCall();
  context_.CheckWritable();
  Lock lock = mutex_.LockForCall();
  return committer_.Commit(lock, std::move(meta), std::move(tag));
}

std::vector<CommitRecord> Store::Commits() {
  context_.CheckOpen();
  const Lock lock(mutex_);
  return state_.commits.kept;
}

void Store::DropCommit(std::uint64_t id) {
  const auto call = BeginCall();
  context_.CheckWritable();
  Lock lock = mutex_.LockForCall();
  committer_.Drop(lock, id);
}

std::string Store::Meta() {
  context_.CheckOpen();
  const Lock lock(mutex_);
  return state_.commits.meta;
}

StoreCounters Store::Stats() {
  context_.CheckOpen();
  const Lock lock(mutex_);
  context_.CheckOpen();
  StoreCounters counters;
  for (const auto& table : state_.rows.tables()) {
    if (table == nullptr) continue;
    counters.rows += table->index.size();
    counters.live_bytes += table->index.size() * table->row_class->geometry.row_bytes;
    counters.index_bytes += table->index.bytes();
    counters.dense_rows += table->index.dense_rows();
  }
  const auto& segments = state_.segments.by_number();
  counters.disk_bytes = state_.space.meta_bytes();
  for (const auto& [number, segment] : segments) {
    counters.disk_bytes += segment->file_bytes;
    if (segment->retired) counters.kept_bytes += segment->file_bytes;
    counters.buffer_bytes += segment->footer.keys.size() * 8 + segment->footer.epochs.size() * 4 +
                             segment->kept_bits.capacity() * 8;
  }
  counters.buffer_bytes += queue_.memory_bytes();
  counters.segments = segments.size();
  counters.snapshot_failures = snapshots_.failures();
  counters.rebuilt_rows = snapshots_.rebuilt_rows();
  counters.begun_snapshots = snapshots_.begun();
  counters.saved_snapshots = snapshots_.saved();
  counters.written_rows = written_rows_;
  counters.written_bytes = queue_.written_bytes() + state_.space.meta_bytes_written();
  counters.relocated_rows = compactor_.relocated_rows();
  counters.renewed_commits = committer_.renewals();
  counters.read = reader_.counters();
  counters.io = reader_.io();
  counters.direct = !segments.empty() && segments.rbegin()->second->file->IsDirect();
  return counters;
}

bool Store::CountsAreExact() {
  context_.CheckOpen();
  const Lock lock(mutex_);
  return state_.space.CountsAreExact();
}

void Store::Compact() {
  const auto call = BeginCall();
  context_.CheckWritable();
  Lock lock(mutex_);
  queue_.ThrowPending();
  control_.Demand(lock, {.all = true}, [this] { return queue_.HasError(); });
  queue_.ThrowPending();
}

void Store::SetCap(std::uint64_t bytes) {
  const auto call = BeginCall();
  context_.CheckWritable();
  const Lock lock(mutex_);
  state_.space.SetCap(bytes);
  control_.Wake();
}

}  // namespace tierstore
