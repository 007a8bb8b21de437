// Holds the locations of one table's rows, in two parts: ids that lie close together in dense ranges
// (store/dense_ranges.h), all other ids in a hash index (store/index.h). Both are exact.
//
// New ids come to the hash index. A range of ids becomes dense when a share kDenseShare of its ids is there:
// from then on the array takes less than entries of the hash index do. One id in 64 is counted to know
// that, and all ids of a range are counted before the range becomes dense. Ids never leave a table, so a
// dense range stays one.
//
// IndexForm::dense_from says from how many rows of a table on its ranges become dense: from none
// (`compact`), never (`hash`), or in between (`auto`). One range becomes dense per call of Put, so that no
// call takes long. When ranges have left much of the hash index empty, the hash index gives memory back: its
// entries move to a smaller hash index, some with every call. Until all entries have moved there are two hash
// indexes.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "common/key.h"
#include "store/dense_ranges.h"
#include "store/index.h"

namespace tierstore {

struct IndexForm {
  static constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();
  static constexpr std::uint64_t kAuto = 1 << DenseRanges::kRangeBits;

  std::uint64_t dense_from = kAuto;  // rows of a table
  unsigned range_bits = DenseRanges::kRangeBits;
};

class TableLocations {
 public:
  static constexpr double kDenseShare = 0.375;

  explicit TableLocations(const IndexForm& form) : form_(form), ranges_(form.range_bits) {}

  // These functions do what TableIndex's functions do.
  void Find(const std::uint64_t* ids, std::size_t n, Location* locations) const;
  Location Find(std::uint64_t id) const;
  void Put(const std::uint64_t* ids, const Location* locations, std::size_t n, Location* previous);
  Location Put(std::uint64_t id, Location location);
  // Makes room for this many rows, which are about to be put.
  void Reserve(std::size_t rows);

  // A Listing lists all ids, in steps. Ids that were there at its start come once, whatever is put between
  // two steps. Ids that are put later may come, once.
  class Listing {
    friend class TableLocations;

    // What was listed of the hash index: ids before `at` in the order.
    struct Order {
      TableIndex::Permutation permutation;
      std::uint64_t number, at;

      bool Has(std::uint64_t id) const { return TableIndex::ListPlace(permutation, id) < at; }
    };
    std::vector<Order> orders_;  // the present order comes last
    std::uint64_t range_at_ = 0;
  };
  // Appends at most `limit` of the list's next ids with their locations, perhaps none. Returns false at the
  // end.
  bool List(Listing& listing, std::size_t limit, std::vector<std::uint64_t>& ids,
            std::vector<Location>* locations);

  std::size_t size() const { return hash_.size() + (IsShrinking() ? former_->size() : 0) + ranges_.size(); }
  std::size_t bytes() const {
    return hash_.bytes() + (IsShrinking() ? former_->bytes() : 0) + ranges_.bytes();
  }
  std::size_t dense_rows() const { return ranges_.size(); }

  // Threads change locations side by side, in different parts of the index (store/index_replay.h). Two parts
  // of the same half of all parts are not neighbours.
  static constexpr std::size_t kParts = 512;
  std::size_t PartOf(std::uint64_t id) const;
  void Prefetch(std::uint64_t id) const;
  // Gives ranges room for locations up to `most`.
  void Fit(Location most) { ranges_.Fit(most); }
  bool IsDense(std::uint64_t id) const { return ranges_.Has(id); }
  // Returns whether Replace may set this location of an id. For ids in ranges, call Fit before.
  bool MayReplace(std::uint64_t id, Location location) const;
  // Sets the location of an id that is there, or that IsDense: its caller then counts it in ranges().
  void Replace(std::uint64_t id, Location location);

  // Moves this many entries to the smaller hash index, while IsShrinking. hash() then lacks entries. Throws
  // std::bad_alloc.
  bool IsShrinking() const { return former_ != nullptr; }
  void GoOnShrinking(std::size_t entries = kEntriesAtOnce);

  // No range becomes dense, and no shrinking begins, while this is set.
  void HoldRanges(bool held) { held_ = held; }

  // The two kinds of ids, for snapshots. Code that fills the hash index otherwise than by Put passes the
  // hashes of all entries for which IsSampled is true to NoteSampled.
  TableIndex& hash() { return hash_; }
  const TableIndex& hash() const { return hash_; }
  DenseRanges& ranges() { return ranges_; }
  const DenseRanges& ranges() const { return ranges_; }
  bool MayBeDense() const { return form_.dense_from != IndexForm::kNever; }
  bool IsSampled(std::uint64_t hash) const { return (hash & SampleMask()) == 0; }
  void NoteSampled(std::uint64_t hash);

 private:
  struct Hasher {
    std::size_t operator()(std::uint64_t number) const { return HashKey(number); }
  };
  static constexpr std::size_t kEntriesAtOnce = 1 << 14;

  std::uint64_t SampleMask() const;
  std::uint32_t LeastSamples() const;
  void NoteNew(std::uint64_t id);
  Location PutOne(std::uint64_t id, Location location);
  static void DropListed(std::span<const Listing::Order> orders, std::size_t first,
                         std::vector<std::uint64_t>& ids, std::vector<Location>* locations);
  void Tidy();
  void MakeRangeDense();
  bool MakeDense(std::uint64_t number);

  IndexForm form_;
  TableIndex hash_;
  DenseRanges ranges_;
  std::unordered_map<std::uint64_t, std::uint32_t, Hasher> samples_;  // in the hash index, by range
  std::vector<std::uint64_t> due_;                                    // ranges with enough samples
  // The larger hash index while IsShrinking, and the end of its entries. It only loses entries.
  std::unique_ptr<TableIndex> former_;
  std::int64_t former_end_ = 0;
  bool held_ = false;
};

}  // namespace tierstore
