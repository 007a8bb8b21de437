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
#include "bindings/tensors.h"
#include "bindings/unlocked.h"
#include "cache/batch.h"
#include "cache/resident_lookups.h"
#include "cache/stopwatch.h"
#include "kernels/lookup.h"

namespace py = pybind11;

namespace tierstore {
namespace {

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
    auto made = std::make_unique<PooledLookup>(PooledLookup{
        {std::make_shared<Batch>(), nullptr},
        BagArgs{own.offsets, own.bag_begin, places.first, places.stride, features.modes}.Checked()});
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

// Returned where a tensor has to be made ready first.
py::object NotReady() { return py::reinterpret_borrow<py::object>(Py_NotImplemented); }

// Reads a tensor, unless it is None. Returns false where the tensor has to be made ready first.
bool ReadOptional(const py::object& tensor, std::optional<IntegerTensor>* out) {
  if (tensor.is_none()) return true;
  *out = IntegersOf(tensor);
  return out->has_value();
}

// Returns nothing where the bags do not fit the ids, or have an ndim that no bags have.
std::optional<KeyedBags> BagsOfOneKey(const IntegerTensor& ids, const std::optional<IntegerTensor>& offsets,
                                      bool has_end) {
  if (ids.ndim != (offsets ? 1 : 2) || (offsets && offsets->ndim != 1)) return std::nullopt;
  if (!offsets) return EqualBags(ids.shape[0], ids.shape[1]);
  return BagsOrNone([&] { return BagsFromOffsets(offsets->args, std::get<1>(ids.args), has_end); });
}

py::object PoolBags(const ResidentForward& self, const KeyedFeatures& features, const Places& places,
                    const py::object& id_tensor, const py::object& offset_tensor, bool has_end, Address out) {
  std::optional<IntegerTensor> offsets;
  if (!ReadOptional(offset_tensor, &offsets)) return NotReady();
  const auto ids = IntegersOf(id_tensor);
  if (!ids) return NotReady();
  const Clock call;
  const auto bags = BagsOfOneKey(*ids, offsets, has_end);
  return bags ? self.Pool(call, features, *bags, ids->args, places, out) : py::none();
}

// Calls `lookup` with the bags of all keys, as many of each, and the ids.
template <typename Lookup>
py::object OfKeys(const py::object& id_tensor, const py::object& length_tensor,
                  const py::object& offset_tensor, std::size_t keys, const Lookup& lookup) {
  std::optional<IntegerTensor> offsets;
  if (!ReadOptional(offset_tensor, &offsets)) return NotReady();
  const auto ids = IntegersOf(id_tensor), lengths = IntegersOf(length_tensor);
  if (!ids || ids->ndim != 1 || !lengths) return NotReady();
  const Clock call;
  const auto bags = BagsOrNone([&] {
    Require(keys > 0, "there are no keys");
    const std::int64_t stride = std::get<1>(lengths->args) / static_cast<std::int64_t>(keys);
    const std::vector<std::int64_t> strides(keys, stride);
    return MakeKeyedBags(lengths->args, strides, std::get<1>(ids->args),
                         offsets ? std::optional(offsets->args) : std::nullopt);
  });
  return bags ? lookup(call, *bags, ids->args) : py::none();
}

py::object PoolLengths(const ResidentForward& self, const KeyedFeatures& features, const Places& places,
                       const py::object& ids, const py::object& lengths, const py::object& offsets,
                       std::size_t keys, Address out) {
  return OfKeys(ids, lengths, offsets, keys, [&](const Clock& call, const KeyedBags& bags, const auto& args) {
    return self.Pool(call, features, bags, args, places, out);
  });
}

py::object CopyLengths(const ResidentForward& self, const KeyedFeatures& features, const py::object& ids,
                       const py::object& lengths, const py::object& offsets, std::size_t keys, Address out) {
  return OfKeys(ids, lengths, offsets, keys, [&](const Clock& call, const KeyedBags& bags, const auto& args) {
    return self.Copy(call, features, bags, args, out);
  });
}

py::object CopyEach(const ResidentForward& self, const KeyedFeatures& features, const py::object& id_tensor,
                    Address out) {
  const auto ids = IntegersOf(id_tensor);
  if (!ids) return NotReady();
  const Clock call;
  return self.Copy(call, features, EqualBags(std::get<1>(ids->args), 1), ids->args, out);
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
      "copies the rows to out (the address of float32) if all rows are here. Each call returns (the lookup, "
      "whether the rows were found, whether ResidentLookups.take() should be called), or None for wrong ids "
      "or bags. ids, lengths and offsets are tensors: int32 or int64, contiguous, in this machine's memory; "
      "NotImplemented is returned for others. reads: the lookups only read, as ResidentLookups.read does.")
      .def(py::init([](ResidentLookups& lookups, const HostRows& rows, std::int64_t dim, bool reads) {
             return ResidentForward{lookups, rows, dim, reads};
           }),
           py::arg("lookups"), py::arg("rows"), py::arg("dim"), py::arg("reads"), py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>())
      .def("pool_bags", &PoolBags, py::arg("features"), py::arg("places"), py::arg("ids"), py::arg("offsets"),
           py::arg("has_end"), py::arg("out"),
           "Pool the bags of one key: each row of ids, or where offsets begin. has_end says whether the last "
           "offset is the end of the last bag.")
      .def("pool_lengths", &PoolLengths, py::arg("features"), py::arg("places"), py::arg("ids"),
           py::arg("lengths"), py::arg("offsets"), py::arg("keys"), py::arg("out"),
           "Pool the bags of several keys, as many of each. offsets may be None.")
      .def("copy_each", &CopyEach, py::arg("features"), py::arg("ids"), py::arg("out"),
           "Copy the rows of the ids of one key.")
      .def("copy_lengths", &CopyLengths, py::arg("features"), py::arg("ids"), py::arg("lengths"),
           py::arg("offsets"), py::arg("keys"), py::arg("out"),
           "Copy the rows of the ids of all keys, each of which one feature has. Bags are given as "
           "pool_lengths takes them.");
}

}  // namespace tierstore
