#include "cache/resident_lookups.h"

#include <algorithm>
#include <utility>

#include "cache/csr.h"
#include "cache/stopwatch.h"
#include "common/key.h"

namespace tierstore {
namespace {
constexpr std::size_t kMostLookups = 16;
constexpr std::int64_t kMostPositions = 1 << 19;
constexpr std::int64_t kBlock = 512;  // rows that are looked up at a time
}  // namespace

void ResidentLookups::SetHidden(bool hidden) {
  const std::unique_lock lock(showing_);
  hidden_ = hidden;
}

// Stops at the first rows that are missing, since the plan for them will look up every row.
bool ResidentLookups::FindSlots(const Batch& batch, PageVector<std::int32_t>* slots) const {
  const auto n = static_cast<std::int64_t>(batch.unique.size());
  slots->resize(batch.unique.size());
  const std::shared_lock lock(showing_);
  if (hidden_) return false;
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, n - begin);
    std::int32_t* const found = slots->data() + begin;
    tier_.Find(batch.unique.data() + begin, count, found);
    // Rows at overflow slots leave.
    const auto stays = [&](std::int32_t slot) { return slot >= 0 && slot < tier_.capacity(); };
    if (!std::all_of(found, found + count, stays)) return false;
  }
  return true;
}

std::shared_ptr<ResidentRows> ResidentLookups::Find(std::shared_ptr<Batch> batch) {
  double seconds = 0;
  auto rows = std::make_shared<ResidentRows>();
  {
    const Stopwatch watch(&seconds);
    if (!FindSlots(*batch, &rows->slots)) return nullptr;
    const auto n = static_cast<std::int64_t>(batch->inverse.size());
    const auto unique = static_cast<std::int64_t>(batch->unique.size());
    rows->csr_start.resize(static_cast<std::size_t>(unique + 1));
    CountPositions(batch->inverse.data(), n, unique, rows->csr_start.data());
    rows->csr_positions.resize(static_cast<std::size_t>(rows->csr_start.back()));
    PlacePositions(batch->inverse.data(), n, unique, rows->csr_start.data(), rows->csr_positions.data());
    rows->batch = std::move(batch);
  }
  const std::lock_guard lock(counting_);
  counted_.lookups.push_back(rows);
  for (const std::uint64_t key : rows->batch->unique) {
    if (KeyTable(key) < tables_) ++counted_.table_rows[KeyTable(key)];
  }
  counted_.positions += rows->csr_start.back();
  counted_.seconds += seconds;
  return rows;
}

bool ResidentLookups::due() const {
  const std::lock_guard lock(counting_);
  return counted_.lookups.size() >= kMostLookups || counted_.positions >= kMostPositions;
}

ResidentLookups::Counted ResidentLookups::Take() {
  const std::lock_guard lock(counting_);
  return std::exchange(counted_, NothingCounted());
}

}  // namespace tierstore
