// Binds ResidentForward: the forward pass of a lookup of rows that stay in a tier is one call.
#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/host_rows.h"
#include "bindings/keyed.h"
#include "bindings/registry.h"
#include "bindings/unlocked.h"
#include "cache/batch.h"
#include "cache/resident_lookups.h"
#include "cache/stopwatch.h"
#include "kernels/lookup.h"

namespace py = pybind11;

namespace tierstore {
namespace {

// Places say where each feature's vectors begin in the output, and how far they lie apart.
using Places = std::tuple<Array<std::int64_t>, Array<std::int64_t>>;

// Found is a lookup. `rows` is null where some of its rows were not here: no kernel has run then.
struct Found {
  std::shared_ptr<Batch> batch;
  std::shared_ptr<ResidentRows> rows;
};
struct PooledLookup : Found {
  BagArgs bags;
};
struct RowLookup : Found {
  KeyedBags bags;  // of all keys
};

// Tells the seconds since the clock was made.
class Clock {
 public:
  double Seconds() const { return std::chrono::duration<double>(Steady::now() - begin_).count(); }

 private:
  using Steady = std::chrono::steady_clock;
  Steady::time_point begin_ = Steady::now();
};

// Makes lookups in a tier that no row leaves. `rows` are the tier's rows, with `dim` weights each. `reads`:
// outside of training, so that the lookups are no uses of rows.
struct ResidentForward {
  ResidentLookups& lookups;
  const HostRows& rows;
  std::int64_t dim;
  bool reads;

  // `call`: began with the native call, all of which until repeated ids are removed is the stage "announce".
  py::object Pool(const Clock& call, const KeyedFeatures& features, const KeyedBags& bags,
                  const IntegerArgs& ids, const Places& places, Address out) const {
    const KeyedBags own = features.Own(bags);
    const auto& [out_offset, out_stride] = places;
    auto made = std::make_unique<PooledLookup>(
        PooledLookup{{std::make_shared<Batch>(), nullptr},
                     BagArgs{own.offsets, own.bag_begin, out_offset, out_stride, features.modes}.Checked()});
    Require(!made->bags.TakesMax(),
            "max pooling needs the argmax of each value, which this call does not return");
    const Bags of = made->bags.Get();
    return Made(call, std::move(made), features, bags, ids, of.num_positions(), [&](const Gather& gather) {
      LookupPooled(gather, of, nullptr, reinterpret_cast<float*>(out), nullptr);
    });
  }

  py::object Copy(const Clock& call, const KeyedFeatures& features, const KeyedBags& bags,
                  const IntegerArgs& ids, Address out) const {
    auto made = std::make_unique<RowLookup>(RowLookup{{std::make_shared<Batch>(), nullptr}, bags});
    const std::int64_t positions = std::get<1>(ids);
    return Made(call, std::move(made), features, bags, ids, positions, [&](const Gather& gather) {
      LookupRows(gather, positions, reinterpret_cast<float*>(out), dim);
    });
  }

  // Returns (the lookup, whether its rows were found, whether lookups should be counted), or None for a wrong
  // id.
  template <typename Lookup, typename Kernel>
  py::object Made(const Clock& call, std::unique_ptr<Lookup> made, const KeyedFeatures& features,
                  const KeyedBags& bags, const IntegerArgs& id_args, std::int64_t positions,
                  const Kernel& kernel) const {
    const Integers ids(id_args);
    features.Check(bags);
    Require(ids.count == bags.num_ids(), "the bags are of another number of ids");
    if (!Run(call, features.Segments(bags, ids), positions, made.get(), kernel)) return py::none();
    const bool found = made->rows != nullptr, due = lookups.due();
    return py::make_tuple(std::move(made), found, due);
  }

  // Returns false for a wrong id.
  template <typename Kernel>
  bool Run(const Clock& call, const std::vector<IdSegment>& segments, std::int64_t positions, Found* made,
           const Kernel& kernel) const {
    const Rows at = rows.Of(dim);
    double compute = 0;
    const UnlockedIfMany unlocked(positions);
    if (Deduplicate(segments, made->batch.get()).segment >= 0) return false;
    const double announce = call.Seconds();
    const PageVector<std::int32_t>& inverse = made->batch->inverse;
    Require(positions == static_cast<std::int64_t>(inverse.size()),
            "the number of positions is not the number of the features' ids");
    made->rows = reads ? lookups.Read(made->batch, false) : lookups.Find(made->batch);
    if (made->rows != nullptr) {
      const Stopwatch watch(&compute);
      const PageVector<std::int32_t>& slots = made->rows->slots;
      kernel(Gather{at, dim, slots.data(), static_cast<std::int64_t>(slots.size()), inverse.data()});
    }
    lookups.AddSeconds(announce, compute);
    return true;
  }
};

// Returns no bags where the bags do not fit the ids.
template <typename Make>
std::optional<KeyedBags> BagsOrNone(const Make& make) {
  try {
    return make();
  } catch (const std::invalid_argument&) {
    return std::nullopt;
  }
}

py::object PoolEqual(const ResidentForward& self, const KeyedFeatures& features, const IntegerArgs& ids,
                     const Places& places, Address out, std::int64_t count, std::int64_t length) {
  const Clock call;
  return self.Pool(call, features, EqualBags(count, length), ids, places, out);
}

py::object PoolOffsets(const ResidentForward& self, const KeyedFeatures& features, const IntegerArgs& ids,
                       const Places& places, Address out, const IntegerArgs& offsets, bool has_end) {
  const Clock call;
  const auto bags = BagsOrNone([&] { return BagsFromOffsets(offsets, std::get<1>(ids), has_end); });
  return bags ? self.Pool(call, features, *bags, ids, places, out) : py::none();
}

py::object PoolLengths(const ResidentForward& self, const KeyedFeatures& features, const IntegerArgs& ids,
                       const Places& places, Address out, const IntegerArgs& lengths, std::size_t keys,
                       std::int64_t stride, const std::optional<IntegerArgs>& offsets) {
  const Clock call;
  const auto bags = BagsOrNone([&] {
    return MakeKeyedBags(lengths, std::vector<std::int64_t>(keys, stride), std::get<1>(ids), offsets);
  });
  return bags ? self.Pool(call, features, *bags, ids, places, out) : py::none();
}

py::object CopyEach(const ResidentForward& self, const KeyedFeatures& features, const IntegerArgs& ids,
                    Address out) {
  const Clock call;
  return self.Copy(call, features, EqualBags(std::get<1>(ids), 1), ids, out);
}

py::object CopyLengths(const ResidentForward& self, const KeyedFeatures& features, const IntegerArgs& ids,
                       Address out, const IntegerArgs& lengths, std::size_t keys, std::int64_t stride,
                       const std::optional<IntegerArgs>& offsets) {
  const Clock call;
  const auto bags = BagsOrNone([&] {
    return MakeKeyedBags(lengths, std::vector<std::int64_t>(keys, stride), std::get<1>(ids), offsets);
  });
  return bags ? self.Copy(call, features, *bags, ids, out) : py::none();
}

}  // namespace

TIERSTORE_BINDINGS(resident_pooling) {
  py::class_<PooledLookup>(m, "PooledLookup", "A pooled lookup; rows is None where some rows were not here.")
      .def_readonly("batch", &PooledLookup::batch)
      .def_readonly("bags", &PooledLookup::bags)
      .def_readonly("rows", &PooledLookup::rows);
  py::class_<RowLookup>(m, "RowLookup", "A lookup of rows one by one; bags has the bags of all keys.")
      .def_readonly("batch", &RowLookup::batch)
      .def_readonly("bags", &RowLookup::bags)
      .def_readonly("rows", &RowLookup::rows);
  py::class_<ResidentForward>(
      m, "ResidentForward",
      "Lookups of rows that stay in a tier. Each call removes repeated ids, finds the rows, and pools or "
      "copies the rows to out (the address of float32) if all rows are here. ids, lengths and offsets are as "
      "in KeyedBags; places has out_offset and out_stride as in Bags. Each call returns (the lookup, whether "
      "the rows were found, whether ResidentLookups.take() should be called), or None for ids or bags that "
      "are wrong. reads: the lookups only read, as ResidentLookups.read does.")
      .def(py::init([](ResidentLookups& lookups, const HostRows& rows, std::int64_t dim, bool reads) {
             return ResidentForward{lookups, rows, dim, reads};
           }),
           py::arg("lookups"), py::arg("rows"), py::arg("dim"), py::arg("reads"), py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>())
      .def("pool_equal", &PoolEqual, py::arg("features"), py::arg("ids"), py::arg("places"), py::arg("out"),
           py::arg("count"), py::arg("length"), "Pool bags that are given as KeyedBags.equal takes them.")
      .def("pool_offsets", &PoolOffsets, py::arg("features"), py::arg("ids"), py::arg("places"),
           py::arg("out"), py::arg("offsets"), py::arg("has_end"),
           "Pool bags that are given as KeyedBags.from_offsets takes them.")
      .def("pool_lengths", &PoolLengths, py::arg("features"), py::arg("ids"), py::arg("places"),
           py::arg("out"), py::arg("lengths"), py::arg("keys"), py::arg("stride"), py::arg("offsets"),
           "Pool bags that are given as KeyedBags takes them, stride bags for each of the keys.")
      .def("copy_each", &CopyEach, py::arg("features"), py::arg("ids"), py::arg("out"),
           "Copy the rows of the ids of one key.")
      .def("copy_lengths", &CopyLengths, py::arg("features"), py::arg("ids"), py::arg("out"),
           py::arg("lengths"), py::arg("keys"), py::arg("stride"), py::arg("offsets"),
           "Copy the rows of the ids of all keys, each of which one feature has. Bags are given as "
           "pool_lengths takes them.");
}

}  // namespace tierstore
