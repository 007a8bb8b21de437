// Binds batches of keys: KeyedBags has the bags of all keys, and KeyedFeatures makes the features of one row
// layout of these bags in one call.
#include "bindings/keyed.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/registry.h"
#include "bindings/shared_offsets.h"
#include "cache/batch.h"

namespace py = pybind11;

namespace tierstore {
namespace {

// Getting the interpreter's lock back from a busy thread takes longer than reading some lengths.
constexpr std::int64_t kUnlockFrom = 1 << 16;

// Writes where each bag begins, and the end of the last bag. Returns false if a length is negative, or if the
// lengths do not add up to `total`.
template <typename T>
bool SumLengths(const T* lengths, std::int64_t bags, std::int64_t total, std::int64_t* offsets) {
  std::uint64_t at = 0;
  bool fits = true;
  for (std::int64_t bag = 0; bag < bags; ++bag) {
    const auto length = static_cast<std::uint64_t>(static_cast<std::int64_t>(lengths[bag]));
    offsets[bag] = static_cast<std::int64_t>(at);
    fits &= length <= static_cast<std::uint64_t>(total);
    at += length;
  }
  offsets[bags] = static_cast<std::int64_t>(at);
  return fits && at == static_cast<std::uint64_t>(total);
}

bool SumLengths(const Integers& lengths, std::int64_t total, std::int64_t* offsets) {
  const auto sum = [&] {
    return lengths.is_int32
               ? SumLengths(static_cast<const std::int32_t*>(lengths.From(0)), lengths.count, total, offsets)
               : SumLengths(static_cast<const std::int64_t*>(lengths.From(0)), lengths.count, total, offsets);
  };
  if (lengths.count < kUnlockFrom) return sum();
  const py::gil_scoped_release unlocked;
  return sum();
}

// Returns whether all lengths are 1. As a rule the first length tells that they are not.
bool AreOnes(const Integers& lengths) {
  const auto are_ones = [&] {
    const auto of = [&](const auto* from) {
      return std::all_of(from, from + lengths.count, [](auto length) { return length == 1; });
    };
    return lengths.is_int32 ? of(static_cast<const std::int32_t*>(lengths.From(0)))
                            : of(static_cast<const std::int64_t*>(lengths.From(0)));
  };
  if (lengths.count < kUnlockFrom) return are_ones();
  const py::gil_scoped_release unlocked;
  return are_ones();
}

}  // namespace

std::vector<std::int64_t> KeyedBags::Counts(const Array<std::int64_t>& keys) const {
  std::vector<std::int64_t> counts;
  counts.reserve(static_cast<std::size_t>(keys.size()));
  for (py::ssize_t at = 0; at < keys.size(); ++at) {
    const std::int64_t key = keys.data()[at];
    Require(key >= 0 && key < num_keys(), "there are not so many keys");
    counts.push_back(IdBegin(key + 1) - IdBegin(key));
  }
  return counts;
}

KeyedBags MakeKeyedBags(const IntegerArgs& length_args, const std::vector<std::int64_t>& bags_per_key,
                        std::int64_t num_ids, const std::optional<IntegerArgs>& offset_args) {
  const Integers lengths(length_args);
  const bool one_each = lengths.count == num_ids && lengths.count < kMostShared && AreOnes(lengths);
  KeyedBags bags{one_each ? SharedOffsets(lengths.count + 1) : Fresh<std::int64_t>(lengths.count + 1),
                 Array<std::int64_t>(static_cast<py::ssize_t>(bags_per_key.size()) + 1)};
  std::int64_t* const begin = bags.bag_begin.mutable_data();
  begin[0] = 0;
  for (std::size_t key = 0; key < bags_per_key.size(); ++key) {
    Require(bags_per_key[key] >= 0 && bags_per_key[key] <= lengths.count - begin[key],
            "the bags of the keys do not add up to the number of lengths");
    begin[key + 1] = begin[key] + bags_per_key[key];
  }
  Require(begin[bags_per_key.size()] == lengths.count,
          "the bags of the keys do not add up to the number of lengths");
  if (offset_args) {
    const Integers offsets(*offset_args);
    Require(offsets.count > 0, "offsets must have at least one entry");
    const std::int64_t first = offsets.is_int32 ? *static_cast<const std::int32_t*>(offsets.From(0))
                                                : *static_cast<const std::int64_t*>(offsets.From(0));
    Require(first == 0, "offsets must begin with 0");
  }
  Require(one_each || SumLengths(lengths, num_ids, bags.offsets.mutable_data()),
          "the lengths are negative, or do not add up to the number of ids");
  return bags;
}

KeyedBags EqualBags(std::int64_t count, std::int64_t length) {
  Require(count >= 0 && length >= 0, "count and length must be at least 0");
  const bool one_each = length == 1 && count < kMostShared;
  KeyedBags bags{one_each ? SharedOffsets(count + 1) : Fresh<std::int64_t>(count + 1),
                 Array<std::int64_t>(2)};
  if (!one_each) {
    std::int64_t* const offsets = bags.offsets.mutable_data();
    for (std::int64_t bag = 0; bag <= count; ++bag) offsets[bag] = bag * length;
  }
  bags.bag_begin.mutable_data()[0] = 0;
  bags.bag_begin.mutable_data()[1] = count;
  return bags;
}

namespace {

template <typename T>
bool CopyOffsets(const T* offsets, std::int64_t count, std::int64_t num_ids, std::int64_t* to) {
  bool fits = true;
  std::int64_t last = 0;
  for (std::int64_t bag = 0; bag < count; ++bag) {
    to[bag] = static_cast<std::int64_t>(offsets[bag]);
    fits &= to[bag] >= last && to[bag] <= num_ids;
    last = to[bag];
  }
  return fits && (count == 0 || to[0] == 0);
}

}  // namespace

KeyedBags BagsFromOffsets(const IntegerArgs& args, std::int64_t num_ids, bool has_end) {
  const Integers offsets(args);
  KeyedBags bags{Fresh<std::int64_t>(offsets.count + (has_end ? 0 : 1)), Array<std::int64_t>(2)};
  std::int64_t* const to = bags.offsets.mutable_data();
  Require(offsets.is_int32
              ? CopyOffsets(static_cast<const std::int32_t*>(offsets.From(0)), offsets.count, num_ids, to)
              : CopyOffsets(static_cast<const std::int64_t*>(offsets.From(0)), offsets.count, num_ids, to),
          "the offsets must begin with 0, not decrease, and not exceed the number of ids");
  if (!has_end) to[offsets.count] = num_ids;
  const std::int64_t count = bags.num_bags();
  Require(count >= 0 && to[count] == num_ids && (count > 0 || num_ids == 0),
          "the offsets do not end at the number of ids");
  bags.bag_begin.mutable_data()[0] = 0;
  bags.bag_begin.mutable_data()[1] = count;
  return bags;
}

std::vector<IdSegment> KeyedFeatures::Segments(const KeyedBags& bags, const Integers& ids) const {
  std::vector<IdSegment> segments;
  for (py::ssize_t f = 0; f < keys.size(); ++f) {
    const std::int64_t begin = bags.IdBegin(keys.data()[f]), end = bags.IdBegin(keys.data()[f] + 1);
    segments.push_back({ids.From(begin), end - begin, ids.is_int32,
                        static_cast<std::uint32_t>(tables.data()[f]), bounds.data()[f], padding});
  }
  return segments;
}

KeyedBags KeyedFeatures::Own(const KeyedBags& bags) const {
  if (in_order && bags.num_keys() == keys.size()) return bags;
  Array<std::int64_t> begin(keys.size() + 1);
  begin.mutable_data()[0] = 0;
  for (py::ssize_t f = 0; f < keys.size(); ++f) {
    const std::int64_t* const first = bags.bag_begin.data() + keys.data()[f];
    begin.mutable_data()[f + 1] = begin.data()[f] + first[1] - first[0];
  }
  const std::int64_t num_bags = begin.data()[keys.size()];
  if (num_bags < kMostShared && AreShared(bags.offsets)) return {SharedOffsets(num_bags + 1), begin};
  Array<std::int64_t> offsets = Fresh<std::int64_t>(num_bags + 1);
  std::int64_t* to = offsets.mutable_data();
  std::int64_t at = *to = 0;
  for (py::ssize_t f = 0; f < keys.size(); ++f) {
    const std::int64_t* const first = bags.offsets.data() + bags.bag_begin.data()[keys.data()[f]];
    const std::int64_t* const last = bags.offsets.data() + bags.bag_begin.data()[keys.data()[f] + 1];
    for (const std::int64_t* offset = first; offset < last; ++offset) *++to = at + offset[1] - *first;
    at += *last - *first;
  }
  return {offsets, begin};
}

namespace {

std::vector<IdSegment> CheckedSegments(const KeyedFeatures& self, const KeyedBags& bags,
                                       const IntegerArgs& id_args) {
  const Integers ids(id_args);
  self.Check(bags);
  Require(ids.count == bags.num_ids(), "the bags are of another number of ids");
  return self.Segments(bags, ids);
}

py::list ListSegments(const KeyedFeatures& self, const KeyedBags& bags, const IntegerArgs& ids) {
  py::list segments;
  for (const IdSegment& s : CheckedSegments(self, bags, ids))
    segments.append(
        py::make_tuple(reinterpret_cast<Address>(s.ids), s.count, s.is_int32, s.table, s.bound, s.padding));
  return segments;
}

auto OwnBags(const KeyedFeatures& self, const KeyedBags& bags, const Places& places) {
  self.Check(bags);
  const KeyedBags own = self.Own(bags);
  return BagArgs{own.offsets, own.bag_begin, places.first, places.stride, self.modes}.Checked();
}

std::shared_ptr<Batch> MakeBatch(const KeyedFeatures& self, const KeyedBags& bags, const IntegerArgs& ids,
                                 BadId* bad) {
  const std::vector<IdSegment> segments = CheckedSegments(self, bags, ids);
  auto batch = std::make_shared<Batch>();
  const py::gil_scoped_release unlocked;
  *bad = Deduplicate(segments, batch.get());
  return batch;
}

py::tuple MakeLookup(const KeyedFeatures& self, const KeyedBags& bags, const IntegerArgs& ids,
                     const Places& places) {
  BadId bad;
  auto batch = MakeBatch(self, bags, ids, &bad);
  return py::make_tuple(std::move(batch), OwnBags(self, bags, places), bad.segment, bad.position, bad.id);
}

py::tuple MakeRowLookup(const KeyedFeatures& self, const KeyedBags& bags, const IntegerArgs& ids) {
  BadId bad;
  auto batch = MakeBatch(self, bags, ids, &bad);
  return py::make_tuple(std::move(batch), bad.segment, bad.position, bad.id);
}

}  // namespace
}  // namespace tierstore

TIERSTORE_BINDINGS(keyed) {
  using namespace tierstore;
  py::class_<KeyedBags>(
      m, "KeyedBags",
      "The bags of several keys: the bags of the first key, then the bags of the second key, "
      "and so on. lengths and offsets are (address, count, whether they are int32; else "
      "int64); only the first offset is read. Raises ValueError if the parts do not fit one "
      "another.")
      .def(py::init(&MakeKeyedBags), py::arg("lengths"), py::arg("bags_per_key"), py::arg("num_ids"),
           py::arg("offsets") = py::none())
      .def_static("equal", &EqualBags, py::arg("count"), py::arg("length"),
                  "Return the bags of one key, all of the same length.")
      .def_static("from_offsets", &BagsFromOffsets, py::arg("offsets"), py::arg("num_ids"),
                  py::arg("has_end"),
                  "Return the bags of one key. has_end says whether the last offset is the end of the last "
                  "bag.")
      .def_property_readonly("num_bags", &KeyedBags::num_bags)
      .def_property_readonly(
          "id_begin",
          [](const KeyedBags& bags) {
            std::vector<std::int64_t> begin;
            for (std::int64_t key = 0; key <= bags.num_keys(); ++key) begin.push_back(bags.IdBegin(key));
            return begin;
          },
          "Where the ids of every key begin, and where the ids of the last key end.")
      .def("counts", &KeyedBags::Counts, py::arg("keys").noconvert(),
           "Return the number of ids of each of `keys`.");
  py::class_<Places>(m, "Places",
                     "Where each feature's vectors begin in the output, and how many floats they lie apart.")
      .def(py::init([](const Array<std::int64_t>& first, const Array<std::int64_t>& stride) {
             return Places{first, stride};
           }),
           py::arg("first").noconvert(), py::arg("stride").noconvert());
  py::class_<KeyedFeatures>(
      m, "KeyedFeatures",
      "Pooled features of one row layout. keys has the key of a batch that each feature "
      "has, tables the table of the feature's ids, bounds the table's rows (all int64), "
      "and modes the feature's mode as in Bags. Ids equal to padding are left out.")
      .def(py::init([](const Array<std::int64_t>& keys, const Array<std::int64_t>& tables,
                       const Array<std::int64_t>& bounds, const Array<std::uint8_t>& modes,
                       std::int64_t padding) { return KeyedFeatures(keys, tables, bounds, modes, padding); }),
           py::kw_only(), py::arg("keys").noconvert(), py::arg("tables").noconvert(),
           py::arg("bounds").noconvert(), py::arg("modes").noconvert(), py::arg("padding") = -1)
      .def("lookup", &MakeLookup, py::arg("bags"), py::arg("ids"), py::arg("places"),
           "Deduplicate the ids of all features. ids are given as the lengths of KeyedBags are. Returns "
           "(Batch, Bags, bad feature or -1, position of the bad id, the id).")
      .def("segments", &ListSegments, py::arg("bags"), py::arg("ids"),
           "Return the ids of each feature, as make_batch takes them.")
      .def("bags", &OwnBags, py::arg("bags"), py::arg("places"), "Return the Bags of lookup.")
      .def("lookup_rows", &MakeRowLookup, py::arg("bags"), py::arg("ids"),
           "Do what lookup does for features whose rows are returned one by one. Returns the same without "
           "Bags.");
}
