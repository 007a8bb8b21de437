#include "store/row_index.h"

#include <algorithm>
#include <bit>

#include "common/key.h"
#include "store/errors.h"

namespace tierstore {
namespace {

constexpr std::size_t kMaxTables = std::size_t{1} << (64 - kIdBits);

// So many keys behind a run of one table's keys are fetched.
constexpr std::size_t kAhead = 16;

}  // namespace

// Fetches what the index has of keys that follow the present run. The index of a table fetches further keys
// of its run by itself; but rows that leave memory together, or that lie side by side in files, are of all
// tables in turn, so that most runs have one key.
class RowIndex::Ahead {
 public:
  Ahead(const RowIndex& index, const std::uint64_t* keys, std::size_t n)
      : index_(index), keys_(keys), n_(n) {}

  void Fetch(std::size_t run_end) {
    const std::size_t end = std::min(n_, run_end + kAhead);
    for (at_ = std::max(at_, run_end); at_ < end; ++at_) {
      if (const Table* const table = index_.FindTable(KeyTable(keys_[at_])); table != nullptr)
        table->index.Prefetch(keys_[at_]);
    }
  }

 private:
  const RowIndex& index_;
  const std::uint64_t* keys_;
  std::size_t n_;
  std::size_t at_ = 0;
};

RowIndex::RowIndex(const StoreContext& context, SegmentSet& segments)
    : context_(context), segments_(segments) {}

RowClass& RowIndex::ClassFor(std::uint32_t row_bytes) {
  auto& slot = classes_[row_bytes];
  if (slot == nullptr) {
    const StoreLimits& limits = context_.config.limits;
    slot = std::make_unique<RowClass>();
    slot->geometry = Geometry::For(row_bytes);
    slot->GrowSegments(SegmentBytes(context_.config, context_.config.cap_bytes, 0));
    const std::uint32_t most = slot->geometry.SlotsIn(MostSegmentBytes(context_.config));
    const auto bits = static_cast<unsigned>(std::bit_width(most - 1));
    slot->SetSlotBits(std::max(bits, limits.slot_bits), limits.locations);
    const std::uint32_t frame_bytes = slot->geometry.frame_bytes;
    const std::size_t frames = std::max<std::size_t>(1, limits.chunk_bytes / frame_bytes);
    slot->slots_per_chunk = static_cast<std::uint32_t>(frames) * slot->geometry.records_per_frame;
    slot->chunk_bytes = frames * frame_bytes;
  }
  return *slot;
}

std::uint64_t RowIndex::LargestSegmentBytes() const {
  std::uint64_t largest = 0;
  for (const auto& [row_bytes, row_class] : classes_)
    largest = std::max(largest, row_class->MaxSegmentBytes(true));
  return largest;
}

RowIndex::Table& RowIndex::TableFor(std::uint32_t table, std::uint32_t row_bytes) {
  if (row_bytes == 0 || row_bytes > kMaxRowBytes) {
    throw InputError("rows of " + std::to_string(row_bytes) + " bytes cannot be stored; 1 to " +
                     std::to_string(kMaxRowBytes) + " can");
  }
  if (table >= kMaxTables) throw InputError("table " + std::to_string(table) + " is not below 65536");
  if (table >= tables_.size()) tables_.resize(table + 1);
  auto& entry = tables_[table];
  if (entry == nullptr) entry.reset(new Table{&ClassFor(row_bytes), TableLocations(context_.config.index)});
  const std::uint32_t expected = entry->row_class->geometry.row_bytes;
  if (expected != row_bytes) {
    throw InputError("table " + std::to_string(table) + " has rows of " + std::to_string(expected) +
                     " bytes, not " + std::to_string(row_bytes));
  }
  return *entry;
}

void RowIndex::Find(const std::uint64_t* keys, std::size_t n, Location* locations,
                    const RowClass* row_class) const {
  Ahead ahead(*this, keys, n);
  for (std::size_t at = 0, run = 1; at < n; at += run, run = 1) {
    const std::uint32_t table = KeyTable(keys[at]);
    while (at + run < n && KeyTable(keys[at + run]) == table) ++run;
    ahead.Fetch(at + run);
    const Table* const found = FindTable(table);
    if (found == nullptr || (row_class != nullptr && found->row_class != row_class)) {
      std::fill_n(locations + at, run, TableIndex::kAbsent);
    } else {
      found->index.Find(keys + at, run, locations + at);
    }
  }
}

void RowIndex::Put(const std::uint64_t* keys, const Location* locations, std::size_t n, RowClass& row_class,
                   bool relocated) {
  changed_ = changed_ || n > 0;
  puts_ += n;
  Location previous[256];
  Ahead ahead(*this, keys, n);
  for (std::size_t at = 0; at < n;) {
    std::size_t run = 1;
    while (at + run < n && run < std::size(previous) && KeyTable(keys[at + run]) == KeyTable(keys[at])) ++run;
    ahead.Fetch(at + run);
    Table& table = *tables_[KeyTable(keys[at])];
    table.index.Put(keys + at, locations + at, run, previous);
    for (std::size_t i = 0; i < run; ++i) {
      if (previous[i] == TableIndex::kAbsent) continue;
      const SegmentPtr& segment = row_class.SegmentOf(previous[i]);
      const std::uint32_t slot = row_class.SlotOf(previous[i]);
      for (ScanCapture* const capture : captures_) capture->RowLeaves(*segment, slot, keys[at + i]);
      if (!relocated) segment->Keep(slot);
      segment->AddLive(-1);
      if (segment->live == 0) segments_.RetireIfDead(segment);
    }
    at += run;
  }
}

void RowIndex::ForgetRows() {
  for (auto& table : tables_) {
    if (table != nullptr) table.reset(new Table{table->row_class, TableLocations(context_.config.index)});
  }
}

void RowIndex::Clear() {
  classes_.clear();
  tables_.clear();
}

}  // namespace tierstore
