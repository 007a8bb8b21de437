#include "store/index_replay.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>

#include "common/call_limit.h"
#include "common/key.h"
#include "common/thread_pool.h"

namespace tierstore {
namespace {

constexpr std::uint64_t kSlotsAtOnce = 1 << 21;  // of segments that are replayed together
constexpr std::size_t kKeysPerRun = 256;
constexpr std::size_t kPrefetch = 16;
constexpr std::size_t kParts = TableLocations::kParts;

// Of two versions of a row the version with the higher age is newer.
std::uint64_t AgeOf(const std::vector<ReplaySource>& sources, const RowClass& row_class, Location location) {
  const Segment& segment = *row_class.SegmentOf(location);
  const std::uint32_t slot = row_class.SlotOf(location);
  const ReplaySource& source = sources[segment.ordinal];
  if (slot < source.covered) return 0;
  const std::uint64_t epoch = segment.relocated ? source.epochs[slot] : segment.number;
  return epoch << 32 | std::uint64_t{segment.relocated} << 31 | slot;
}

}  // namespace

// A Batch is the segments of one row class that are replayed together.
struct IndexReplay::Batch {
  RowClass& row_class;
  std::vector<ReplaySource>& sources;
  std::span<const SegmentPtr> segments;
  std::vector<std::vector<Item>> items;                  // by segment
  std::vector<std::array<std::uint32_t, kParts>> parts;  // their numbers by part of the index, by segment
  std::vector<Item> divided;                             // by part
  std::array<std::size_t, kParts + 1> begins{};          // of the parts in `divided`
  std::vector<std::uint8_t> done;                        // by number: the index has the newer version
};

// A Tally has the counts of one thread at a time.
struct IndexReplay::Tally {
  std::vector<std::int32_t> live;               // by ordinal
  std::map<std::uint32_t, std::size_t> filled;  // places of dense ranges, by table
};

void IndexReplay::Run() {
  for (const auto& [row_bytes, row_class] : state_.rows.classes()) {
    const std::vector<ReplaySource>& sources = sources_[row_class.get()];
    std::vector<SegmentPtr> segments;
    std::uint64_t slots = 0;
    for (const SegmentPtr& segment : row_class->segments) {
      const std::uint32_t covered = sources[segment->ordinal].covered;
      if (covered >= segment->slots) continue;
      if (slots > 0 && slots + segment->slots > kSlotsAtOnce) {
        Replay(*row_class, segments);
        segments.clear();
        slots = 0;
      }
      segments.push_back(segment);
      slots += segment->slots;
    }
    if (slots > 0) Replay(*row_class, segments);
  }
}

void IndexReplay::Replay(RowClass& row_class, std::span<const SegmentPtr> segments) {
  Batch batch{row_class, sources_[&row_class], segments, {}, {}, {}, {}, {}};
  batch.items.resize(segments.size());
  batch.parts.resize(segments.size());
  ParallelFor(0, std::ssize(segments), 1,
              [&](std::int64_t at, std::int64_t) { Load(batch, static_cast<std::size_t>(at)); });
  Divide(batch);
  ReplaceInParallel(batch);
  PutRest(batch);
  snapshots_.CountRebuilt(batch.done.size(), batch.done.size() * row_class.geometry.record_bytes);
}

void IndexReplay::Load(Batch& batch, std::size_t at) {
  CheckCall();
  const Segment& segment = *batch.segments[at];
  ReplaySource& source = batch.sources[segment.ordinal];
  Footer footer = LoadKeys(segment, context_.id, source.covered);
  source.epochs = std::move(footer.epochs);
  std::vector<Item>& items = batch.items[at];
  items.reserve(segment.slots - source.covered);
  const auto part_of = [this](std::uint64_t key) {
    const RowIndex::Table* const table = state_.rows.FindTable(KeyTable(key));
    return table == nullptr ? 0 : static_cast<std::uint32_t>(table->index.PartOf(key));
  };
  auto void_slot = std::lower_bound(footer.voids.begin(), footer.voids.end(), source.covered);
  for (std::uint32_t slot = source.covered; slot < segment.slots; ++slot) {
    if (void_slot != footer.voids.end() && *void_slot == slot) {
      ++void_slot;
    } else {
      const std::uint32_t part = part_of(footer.keys[slot]);
      items.push_back({footer.keys[slot], batch.row_class.LocationOf(segment, slot), 0, part});
      ++batch.parts[at][part];
    }
  }
}

// Numbers the items, and sorts them by part. Items of one part keep their order.
void IndexReplay::Divide(Batch& batch) {
  const std::size_t segments = batch.segments.size();
  std::uint32_t total = 0;
  for (std::size_t part = 0; part < kParts; ++part) {
    batch.begins[part] = total;
    for (auto& counts : batch.parts) total += std::exchange(counts[part], total);
  }
  batch.begins[kParts] = total;
  batch.divided.resize(total);
  batch.done.resize(total);
  std::vector<std::uint32_t> firsts(segments);  // numbers
  for (std::size_t i = 1; i < segments; ++i)
    firsts[i] = firsts[i - 1] + static_cast<std::uint32_t>(batch.items[i - 1].size());
  ParallelFor(0, std::ssize(batch.items), 1, [&](std::int64_t at, std::int64_t) {
    const auto segment = static_cast<std::size_t>(at);
    std::uint32_t number = firsts[segment];
    for (Item& item : batch.items[segment]) {
      item.number = number++;
      batch.divided[batch.parts[segment][item.part]++] = item;
    }
  });
}

// Neighbouring parts of a hash index are not worked on at once: a search may look across their border.
void IndexReplay::ReplaceInParallel(Batch& batch) {
  const Location most = Location{batch.row_class.segments.size()} << batch.row_class.slot_bits;
  for (const auto& table : state_.rows.tables()) {
    if (table != nullptr && table->row_class == &batch.row_class) table->index.Fit(most);
  }
  std::vector<std::unique_ptr<Tally>> tallies;  // that no thread uses now
  std::mutex mutex;                             // guards `tallies`
  for (const std::size_t half : {std::size_t{0}, kParts / 2}) {
    ParallelFor(0, kParts / 2, 1, [&](std::int64_t at, std::int64_t) {
      CheckCall();
      std::unique_ptr<Tally> tally;
      {
        const std::lock_guard lock(mutex);
        if (tallies.empty()) {
          tallies.push_back(std::make_unique<Tally>());
          tallies.back()->live.resize(batch.row_class.segments.size());
        }
        tally = std::move(tallies.back());
        tallies.pop_back();
      }
      const std::size_t part = half + static_cast<std::size_t>(at), end = batch.begins[part + 1];
      for (std::size_t i = batch.begins[part]; i < end; ++i) {
        if (i + kPrefetch < end) {
          const std::uint64_t key = batch.divided[i + kPrefetch].key;
          const RowIndex::Table* const table = state_.rows.FindTable(KeyTable(key));
          if (table != nullptr) table->index.Prefetch(key);
        }
        Replace(batch, batch.divided[i], *tally);
      }
      const std::lock_guard lock(mutex);
      tallies.push_back(std::move(tally));
    });
  }
  for (const auto& tally : tallies) {
    for (std::size_t ordinal = 0; ordinal < tally->live.size(); ++ordinal) {
      if (tally->live[ordinal] != 0)
        batch.row_class.segments[ordinal]->live += static_cast<std::uint32_t>(tally->live[ordinal]);
    }
    for (const auto& [table, n] : tally->filled) state_.rows.FindTable(table)->index.ranges().Count(n);
  }
}

// Leaves keys that the hash index lacks, and locations that it has no room for, to PutRest.
void IndexReplay::Replace(Batch& batch, const Item& item, Tally& tally) {
  RowIndex::Table* const table = state_.rows.FindTable(KeyTable(item.key));
  if (table == nullptr || table->row_class != &batch.row_class) return;
  const RowClass& row_class = batch.row_class;
  const Location there = table->index.Find(item.key);
  if (there == TableIndex::kAbsent && !table->index.IsDense(item.key)) return;
  if (!table->index.MayReplace(item.key, item.location)) return;
  batch.done[item.number] = 1;
  if (there == TableIndex::kAbsent) {
    ++tally.filled[KeyTable(item.key)];
  } else if (AgeOf(batch.sources, row_class, there) > AgeOf(batch.sources, row_class, item.location)) {
    return;
  } else {
    --tally.live[there >> row_class.slot_bits];
  }
  table->index.Replace(item.key, item.location);
  ++tally.live[item.location >> row_class.slot_bits];
}

void IndexReplay::PutRest(Batch& batch) {
  Item run[kKeysPerRun];
  std::size_t n = 0;
  for (const std::vector<Item>& items : batch.items) {
    for (const Item& item : items) {
      if (batch.done[item.number] != 0) continue;
      if (n == kKeysPerRun || (n > 0 && KeyTable(run[0].key) != KeyTable(item.key)))
        PutRun(batch, run, std::exchange(n, 0));
      run[n++] = item;
    }
  }
  if (n > 0) PutRun(batch, run, n);
}

// Puts keys of one table.
void IndexReplay::PutRun(Batch& batch, const Item* items, std::size_t n) {
  CheckCall();
  const RowClass& row_class = batch.row_class;
  TableLocations& index = state_.rows.TableFor(KeyTable(items[0].key), row_class.geometry.row_bytes).index;
  for (std::size_t i = 0; i < std::min(n, kPrefetch); ++i) index.Prefetch(items[i].key);
  for (std::size_t i = 0; i < n; ++i) {
    if (i + kPrefetch < n) index.Prefetch(items[i + kPrefetch].key);
    const std::uint64_t key = items[i].key;
    const Location location = items[i].location;
    const Location there = index.Put(key, location);
    if (there != TableIndex::kAbsent &&
        AgeOf(batch.sources, row_class, there) > AgeOf(batch.sources, row_class, location)) {
      index.Put(key, there);
      continue;
    }
    ++row_class.SegmentOf(location)->live;
    if (there != TableIndex::kAbsent) --row_class.SegmentOf(there)->live;
  }
}

}  // namespace tierstore
