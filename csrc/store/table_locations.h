// The locations of one table's rows, in two parts: ids that lie close together in dense ranges
// (store/dense_ranges.h), all others in a hash index (store/index.h). Both are exact.
//
// New ids come to the hash index. A range of ids becomes dense when a share kDenseShare of its ids is there:
// from then on the array takes less than entries of the hash index do. One id in 64 is counted to know that,
// and before a range becomes dense all of its ids are. Ids never leave a table, so a dense range stays one.
//
// IndexForm::dense_from says from how many rows of a table on its ranges become dense: from none
// (`compact`), never (`hash`), or in between (`auto`). One range becomes dense per call of Put, so that no
// call takes long.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

#include "common/key.h"
#include "store/dense_ranges.h"
#include "store/index.h"

namespace tierstore {

struct IndexForm {
  static constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();
  static constexpr std::uint64_t kAuto = 1 << 22;

  std::uint64_t dense_from = kAuto;  // rows of a table
  unsigned range_bits = DenseRanges::kRangeBits;
};

class TableLocations {
 public:
  static constexpr double kDenseShare = 0.375;

  explicit TableLocations(const IndexForm& form) : form_(form), ranges_(form.range_bits) {}

  // As of TableIndex. List is not const since ranges do not become dense while ids are listed: until the end
  // of the list, or until kPutsOfList rows were put after the last call.
  void Find(const std::uint64_t* ids, std::size_t n, Location* locations) const;
  Location Find(std::uint64_t id) const;
  void Put(const std::uint64_t* ids, const Location* locations, std::size_t n, Location* previous);
  Location Put(std::uint64_t id, Location location);
  std::uint64_t List(std::uint64_t cursor, std::size_t limit, std::vector<std::uint64_t>& ids,
                     std::vector<Location>* locations);
  bool IsCurrent(std::uint64_t cursor) const {
    return cursor == 0 || (cursor >> kGenerationShift & kMostGenerations) == Generation();
  }
  // A hint: so many rows are about to be put.
  void Reserve(std::size_t rows);

  std::size_t size() const { return hash_.size() + ranges_.size(); }
  std::size_t bytes() const { return hash_.bytes() + ranges_.bytes(); }
  std::size_t dense_rows() const { return ranges_.size(); }

  // For threads that change locations side by side, in different parts of the index (store/index_replay.h).
  // Two parts of the same half of all parts are not neighbours.
  static constexpr std::size_t kParts = 512;
  std::size_t PartOf(std::uint64_t id) const;
  void Prefetch(std::uint64_t id) const;
  // Gives ranges room for locations up to `most`.
  void Fit(Location most) { ranges_.Fit(most); }
  bool IsDense(std::uint64_t id) const { return ranges_.Has(id); }
  // Whether Replace may set this location of an id; in ranges after Fit.
  bool MayReplace(std::uint64_t id, Location location) const;
  // Sets the location of an id that is there, or that IsDense: its caller then counts it in ranges().
  void Replace(std::uint64_t id, Location location);

  // The two kinds of ids, for snapshots. Who fills the hash index otherwise than by Put passes the hashes to
  // NoteSampled, of all entries for which IsSampled is true.
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
  static constexpr std::size_t kPutsOfList = 1 << 20;
  static constexpr unsigned kGenerationShift = 48;
  static constexpr std::uint64_t kMostGenerations = 0x7fff, kInRanges = std::uint64_t{1} << 63;

  std::uint64_t SampleMask() const;
  std::uint32_t LeastSamples() const;
  std::uint64_t Generation() const { return (hash_.orders() + ranges_.ranges()) & kMostGenerations; }
  std::uint64_t CursorOf(std::uint64_t at) const { return at | Generation() << kGenerationShift; }
  void NoteNew(std::uint64_t id);
  Location PutOne(std::uint64_t id, Location location);
  void MakeRangeDense();
  bool MakeDense(std::uint64_t number);

  IndexForm form_;
  TableIndex hash_;
  DenseRanges ranges_;
  std::unordered_map<std::uint64_t, std::uint32_t, Hasher> samples_;  // in the hash index, by range
  std::vector<std::uint64_t> due_;                                    // ranges with enough of them
  std::size_t puts_ = 0, listed_until_ = 0;                           // the latter in puts
};

}  // namespace tierstore
