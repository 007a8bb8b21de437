// Lookups of rows in a tier that no row ever leaves. Where all rows of a batch are here, a plan would change
// nothing: such a lookup needs no plan, no pinned rows, and no lock of the caller.
//
// A lookup is one call, so that a signal handler of Python cannot cut it in two. What is to be counted of it
// is kept until Take().
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "cache/batch.h"
#include "cache/tier.h"
#include "common/page_allocator.h"

namespace tierstore {

// The rows of a batch: where each unique row is, and the positions that use it (cache/csr.h).
struct ResidentRows {
  std::shared_ptr<Batch> batch;
  PageVector<std::int32_t> slots, csr_start, csr_positions;
};

class ResidentLookups {
 public:
  // Lookups that are not taken yet.
  struct Counted {
    std::vector<std::shared_ptr<ResidentRows>> lookups;
    std::vector<std::int64_t> table_rows;  // unique rows of each table
    std::int64_t positions = 0;
    double seconds = 0;  // that Find took
  };

  // The tier must have no share with a policy, and outlive the object. `tables`: how many there are.
  ResidentLookups(const Tier& tier, std::size_t tables)
      : tier_(tier), tables_(tables), counted_(NothingCounted()) {}

  // Rows are added between Hide and Show only, by one thread at a time. Meanwhile Find finds nothing.
  void Hide() { SetHidden(true); }
  void Show() { SetHidden(false); }

  // Null where a row is missing, or rows are hidden.
  std::shared_ptr<ResidentRows> Find(std::shared_ptr<Batch> batch);
  // Whether so much waits to be counted that Take should be called.
  bool due() const;
  Counted Take();

 private:
  void SetHidden(bool hidden);
  bool FindSlots(const Batch& batch, PageVector<std::int32_t>* slots) const;
  Counted NothingCounted() const { return {{}, std::vector<std::int64_t>(tables_, 0)}; }

  const Tier& tier_;
  const std::size_t tables_;
  mutable std::shared_mutex showing_;  // guards hidden_, and the tier's index against Hide
  bool hidden_ = false;
  mutable std::mutex counting_;  // guards counted_
  Counted counted_;
};

}  // namespace tierstore
