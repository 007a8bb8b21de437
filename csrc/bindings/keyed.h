// Holds batches of keys for Python: the bags of all keys, and the features of one row layout.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/host_rows.h"
#include "cache/batch.h"

namespace tierstore {

// IntegerArgs has the address of integers, their count, and whether they are int32; else they are int64.
using IntegerArgs = std::tuple<Address, std::int64_t, bool>;

struct Integers {
  explicit Integers(const IntegerArgs& args)
      : address(std::get<0>(args)), count(std::get<1>(args)), is_int32(std::get<2>(args)) {}

  const void* From(std::int64_t begin) const {
    return reinterpret_cast<const void*>(address + static_cast<Address>(begin) * (is_int32 ? 4 : 8));
  }

  Address address;
  std::int64_t count;
  bool is_int32;
};

// Bag b holds ids offsets[b] .. offsets[b + 1]; key k has bags bag_begin[k] .. bag_begin[k + 1].
struct KeyedBags {
  Array<std::int64_t> offsets, bag_begin;

  std::int64_t num_bags() const { return offsets.size() - 1; }
  std::int64_t num_keys() const { return bag_begin.size() - 1; }
  std::int64_t num_ids() const { return offsets.data()[offsets.size() - 1]; }
  std::int64_t IdBegin(std::int64_t key) const { return offsets.data()[bag_begin.data()[key]]; }

  // Returns the number of ids of each of `keys`. Throws std::invalid_argument.
  std::vector<std::int64_t> Counts(const Array<std::int64_t>& keys) const;
};

// Throws std::invalid_argument where lengths, offsets and ids do not fit one another.
KeyedBags MakeKeyedBags(const IntegerArgs& length_args, const std::vector<std::int64_t>& bags_per_key,
                        std::int64_t num_ids, const std::optional<IntegerArgs>& offset_args);
// Returns `count` bags of one key, of `length` ids each. Throws std::invalid_argument for a negative number.
KeyedBags EqualBags(std::int64_t count, std::int64_t length);
// Returns the bags of one key. `has_end` says whether the last offset is the end of the last bag. Throws
// std::invalid_argument where offsets and ids do not fit one another.
KeyedBags BagsFromOffsets(const IntegerArgs& args, std::int64_t num_ids, bool has_end);

// Places say where each feature's vectors begin in the output, and how many floats they lie apart.
struct Places {
  Array<std::int64_t> first, stride;
};

// KeyedFeatures are features of one row layout: feature f has the bags of key keys[f], and its ids are rows
// of tables[f].
struct KeyedFeatures {
  Array<std::int64_t> keys, tables, bounds;
  Array<std::uint8_t> modes;
  std::int64_t padding;  // the id that is left out of bags, or -1
  bool in_order = true;  // feature f has key f

  KeyedFeatures(const Array<std::int64_t>& keys, const Array<std::int64_t>& tables,
                const Array<std::int64_t>& bounds, const Array<std::uint8_t>& modes, std::int64_t padding)
      : keys(keys), tables(tables), bounds(bounds), modes(modes), padding(padding) {
    Require(tables.size() == keys.size() && bounds.size() == keys.size() && modes.size() == keys.size(),
            "keys, tables, bounds and modes differ in length");
    for (pybind11::ssize_t f = 0; f < keys.size(); ++f) in_order &= keys.data()[f] == f;
  }

  void Check(const KeyedBags& bags) const {
    for (pybind11::ssize_t f = 0; f < keys.size(); ++f)
      Require(keys.data()[f] >= 0 && keys.data()[f] < bags.num_keys(), "there are not so many keys");
  }

  std::vector<IdSegment> Segments(const KeyedBags& bags, const Integers& ids) const;
  // Returns the bags of these features, as offsets among the ids of these features.
  KeyedBags Own(const KeyedBags& bags) const;
};

}  // namespace tierstore
