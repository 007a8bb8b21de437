#include "cache/resident_lookups.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "cache/csr.h"
#include "cache/stopwatch.h"
#include "common/key.h"
#include "common/thread_pool.h"

namespace tierstore {
namespace {
constexpr std::size_t kMostLookups = 16;
constexpr std::int64_t kMostPositions = 1 << 19;
// In a tier of one lane threads take so many rows, and look up so many of these at a time.
constexpr std::int64_t kPiece = 1 << 12, kBlock = 512;

// Returns the rows at `slots`, with the positions that use each row.
std::shared_ptr<ResidentRows> RowsAt(PageVector<std::int32_t>&& slots, std::shared_ptr<Batch> batch) {
  auto rows = std::make_shared<ResidentRows>();
  const auto unique = static_cast<std::int64_t>(batch->unique.size());
  rows->slots = std::move(slots);
  rows->csr_start.resize(static_cast<std::size_t>(unique + 1));
  CountPositions(batch->inverse, batch->parts, unique, rows->csr_start.data());
  rows->csr_positions.resize(static_cast<std::size_t>(rows->csr_start.back()));
  PlacePositions(batch->inverse, batch->parts, unique, rows->csr_start.data(), rows->csr_positions.data());
  rows->batch = std::move(batch);
  return rows;
}

}  // namespace

void ResidentLookups::Set(bool* flag, bool value) {
  const std::unique_lock lock(showing_);
  *flag = value;
}

// Stops soon after the first rows that are missing, since the plan for them will look up every row. Several
// lanes look up all rows side by side.
bool ResidentLookups::FindSlots(const Batch& batch, PageVector<std::int32_t>* slots, bool may_miss) const {
  const auto n = static_cast<std::int64_t>(batch.unique.size());
  slots->resize(batch.unique.size());
  const std::shared_lock lock(showing_);
  if (hidden_) return false;
  // Rows at overflow slots will leave.
  const auto stays = [&](std::int32_t slot) {
    return slot >= (may_miss ? -1 : 0) && slot < tier_.capacity();
  };
  if (lane_ == nullptr) {
    tier_.Find(batch.unique.data(), n, slots->data());
    return std::all_of(slots->begin(), slots->end(), stays);
  }
  std::atomic<bool> all_stay{true};
  ParallelFor(0, n, kPiece, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t begin = first; begin < last && all_stay; begin += kBlock) {
      const std::int64_t count = std::min(kBlock, last - begin);
      std::int32_t* const found = slots->data() + begin;
      lane_->Find(batch.unique.data() + begin, count, found);
      if (!std::all_of(found, found + count, stays)) all_stay = false;
    }
  });
  return all_stay;
}

std::shared_ptr<ResidentRows> ResidentLookups::Find(std::shared_ptr<Batch> batch) {
  double seconds = 0;
  std::shared_ptr<ResidentRows> rows;
  {
    const Stopwatch watch(&seconds);
    PageVector<std::int32_t> slots;
    if (!FindSlots(*batch, &slots)) return nullptr;
    rows = RowsAt(std::move(slots), std::move(batch));
  }
  Count(rows, {}, seconds);
  return rows;
}

std::shared_ptr<ResidentRows> ResidentLookups::Read(std::shared_ptr<Batch> batch, bool may_miss) {
  auto rows = std::make_shared<ResidentRows>();
  if (!FindSlots(*batch, &rows->slots, may_miss)) return nullptr;
  rows->missing = std::count(rows->slots.begin(), rows->slots.end(), -1);
  rows->batch = std::move(batch);
  const std::lock_guard lock(counting_);
  counted_.read_rows += static_cast<std::int64_t>(rows->slots.size());
  return rows;
}

bool ResidentLookups::AddSlots(const Batch& batch, const NewRows& rows, LanePlan* plan) {
  const std::uint64_t* const keys = batch.unique.data();
  const std::unique_lock lock(showing_);
  if (lane_ == nullptr || hidden_ || planning_ || lane_->overflow_in_use() > 0) return false;
  lane_->Begin(keys, static_cast<std::int64_t>(batch.unique.size()), 0, false, plan);
  if (plan->needed + plan->refused > 0) {
    lane_->Abort(plan);
    return false;
  }
  try {
    rows.Commit(lane_->Prepare(false, *plan));
  } catch (const AddressSpaceError&) {
    lane_->Abort(plan);
    return false;
  }
  lane_->Assign(keys, false, plan);
  PageVector<std::int32_t> slots;
  PageVector<std::uint64_t> added;
  for (const std::int32_t row : plan->absent) {
    slots.push_back(plan->slots[row]);
    added.push_back(keys[row]);
  }
  try {
    rows.Fill(slots, added);
  } catch (...) {
    lane_->Remove(slots.data(), static_cast<std::int64_t>(slots.size()));
    throw;
  }
  return true;
}

std::shared_ptr<ResidentRows> ResidentLookups::Add(std::shared_ptr<Batch> batch, const NewRows& new_rows) {
  double seconds = 0;
  LanePlan plan;
  std::shared_ptr<ResidentRows> rows;
  {
    const Stopwatch watch(&seconds);
    if (!AddSlots(*batch, new_rows, &plan)) return nullptr;
    rows = RowsAt(std::move(plan.slots), std::move(batch));
  }
  Count(rows, plan.absent, seconds);
  return rows;
}

// `added` are the unique rows that were not here.
void ResidentLookups::Count(std::shared_ptr<ResidentRows> rows, const PageVector<std::int32_t>& added,
                            double seconds) {
  const std::lock_guard lock(counting_);
  const PageVector<std::uint64_t>& keys = rows->batch->unique;
  const auto count = [&](std::vector<std::int64_t>* tables, std::uint64_t key, std::int64_t rows) {
    if (KeyTable(key) < tables_) (*tables)[KeyTable(key)] += rows;
  };
  for (std::size_t begin = 0, end = 0; begin < keys.size(); begin = end) {
    while (end < keys.size() && KeyTable(keys[end]) == KeyTable(keys[begin])) ++end;
    const auto run = static_cast<std::int64_t>(end - begin);  // rows of one table come one after another
    count(&counted_.table_rows, keys[begin], run);
    count(&counted_.table_hits, keys[begin], run);
  }
  const std::int64_t positions = rows->csr_start.back();
  counted_.positions += positions;
  counted_.hits += positions;
  for (const std::int32_t row : added) {
    count(&counted_.table_hits, keys[row], -1);
    counted_.hits -= rows->csr_start[row + 1] - rows->csr_start[row];
  }
  counted_.seconds += seconds;
  counted_.lookups.push_back(std::move(rows));
}

void ResidentLookups::AddSeconds(double announce, double compute) {
  const std::lock_guard lock(counting_);
  counted_.announce_seconds += announce;
  counted_.compute_seconds += compute;
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
