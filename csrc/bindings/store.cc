// Binds the row store. tierstore/store/native.py checks shapes and gives the arguments their defaults.
#include "store/store.h"

#include "bindings/arrays.h"
#include "bindings/long_call.h"
#include "bindings/registry.h"
#include "io/errors.h"
#include "store/errors.h"

namespace py = pybind11;

namespace tierstore {
namespace {

using Keys = py::array_t<std::uint64_t, py::array::c_style>;
using Rows = py::array_t<std::uint8_t, py::array::c_style>;
using Slots = py::array_t<std::int32_t, py::array::c_style>;

ReadEngine ParseReadEngine(const std::string& name) {
  if (name == "auto") return ReadEngine::kAuto;
  if (name == "uring") return ReadEngine::kIoUring;
  if (name == "pread") return ReadEngine::kPread;
  throw InputError("io is '" + name + "'; it must be 'auto', 'uring' or 'pread'");
}

IndexForm ParseIndexForm(const std::string& name) {
  if (name == "auto") return {};
  if (name == "hash") return {.dense_from = IndexForm::kNever};
  if (name == "compact") return {.dense_from = 0};
  throw InputError("index is '" + name + "'; it must be 'auto', 'hash' or 'compact'");
}

// `config` is a tierstore.store.native.NativeConfig.
StoreConfig ParseConfig(const py::object& config) {
  StoreConfig out;
  out.cap_bytes = config.attr("cap_bytes").cast<std::uint64_t>();
  out.segment_bytes = config.attr("segment_bytes").cast<std::uint64_t>();
  out.read_engine = ParseReadEngine(config.attr("io").cast<std::string>());
  out.queue_depth = config.attr("queue_depth").cast<unsigned>();
  out.direct = config.attr("direct").cast<bool>();
  out.keep_commits = config.attr("keep").cast<std::size_t>();
  out.read_only = config.attr("read_only").cast<bool>();
  out.at_commit = config.attr("at").cast<std::uint64_t>();
  out.write_buffer_bytes = config.attr("write_buffer_bytes").cast<std::size_t>();
  out.snapshot_min_rows = config.attr("snapshot_min_rows").cast<std::uint64_t>();
  out.index = ParseIndexForm(config.attr("index").cast<std::string>());
  const py::object limits = config.attr("limits");
  if (limits.is_none()) return out;
  out.limits.chunk_bytes = limits.attr("chunk_bytes").cast<std::size_t>();
  out.limits.locations = limits.attr("locations").cast<std::uint64_t>();
  out.limits.slot_bits = limits.attr("slot_bits").cast<unsigned>();
  out.limits.small_segment_bytes = limits.attr("small_segment_bytes").cast<std::uint64_t>();
  out.limits.keys_at_once = limits.attr("keys_at_once").cast<std::size_t>();
  out.limits.replay_rows = limits.attr("replay_rows").cast<std::uint64_t>();
  out.limits.manifest_bytes = limits.attr("manifest_bytes").cast<std::uint64_t>();
  out.index.range_bits = limits.attr("range_bits").cast<unsigned>();
  if (out.index.range_bits < DenseRanges::kLeastRangeBits || out.index.range_bits > DenseRanges::kRangeBits)
    throw InputError("range_bits is " + std::to_string(out.index.range_bits) + "; it must be from 6 to 16");
  return out;
}

void Raise(const char* name, const py::object& arguments) {
  const py::object type = py::module_::import("tierstore.errors").attr(name);
  PyErr_SetObject(type.ptr(), arguments.ptr());
}

void TranslateException(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const IoError& error) {
    if (error.IsFull()) {
      const std::string what = std::string(error.what()) + "; free some space, committed rows are intact";
      Raise("StoreFullError", py::make_tuple(error.code(), what));
    } else {
      Raise("StoreIOError", py::make_tuple(error.code(), error.what()));
    }
  } catch (const FullError& error) {
    Raise("StoreFullError", py::make_tuple(ENOSPC, error.what()));
  } catch (const CorruptError& error) {
    Raise("StoreCorruptError", py::make_tuple(error.what()));
  } catch (const ClosedError& error) {
    Raise("ClosedError", py::make_tuple(error.what()));
  } catch (const InputError& error) {
    Raise("InputError", py::make_tuple(error.what()));
  }
}

// A forked child has none of the store's threads, so the child cannot destroy its copy of a store or scan,
// and leaves the copy in memory. Destroying waits for threads, so the GIL is released.
struct DeleteInOwnProcess {
  template <class Owned>
  void operator()(Owned* owned) const {
    if (!owned->InOwnProcess()) return;
    const py::gil_scoped_release release;
    delete owned;
  }
};
using StoreHolder = std::unique_ptr<Store, DeleteInOwnProcess>;
using ScanHolder = std::unique_ptr<Scan, DeleteInOwnProcess>;

StoreHolder Open(const std::string& directory, const py::object& config,
                 const std::vector<std::pair<std::uint32_t, std::uint32_t>>& tables, Env* env) {
  const StoreConfig parsed = ParseConfig(config);
  StoreHolder store;
  RunLong([&] { store.reset(new Store(env == nullptr ? PosixEnv() : *env, directory, parsed, tables)); });
  return store;
}

// Each of `slots`, which may be None, must be a row of `rows`.
py::array_t<bool> Read(Store& store, const Keys& keys, Rows& rows, const std::optional<Slots>& slots) {
  constexpr std::size_t kRowsOfLongCall = 4096;
  py::array_t<bool> found(keys.size());
  const std::span<const std::uint64_t> span(keys.data(), static_cast<std::size_t>(keys.size()));
  bool* const flags = found.mutable_data();
  const ReadTarget target{reinterpret_cast<std::byte*>(rows.mutable_data()),
                          static_cast<std::uint32_t>(rows.shape(1)),
                          slots.has_value() ? slots->data() : nullptr};
  const auto call = [&] { store.Read(span, target, flags); };
  if (span.size() < kRowsOfLongCall) {
    RunShort(call);
  } else {
    RunLong(call);
  }
  return found;
}

py::array_t<std::uint64_t> Places(Store& store, const Keys& keys) {
  py::array_t<std::uint64_t> places(keys.size());
  std::uint64_t* const out = places.mutable_data();
  RunShort([&] { store.Places({keys.data(), static_cast<std::size_t>(keys.size())}, out); });
  return places;
}

// Each of `slots`, which may be None, must be a row of `rows`.
void Write(Store& store, const Keys& keys, const Rows& rows, const std::optional<Slots>& slots) {
  const auto* data = reinterpret_cast<const std::byte*>(rows.data());
  const std::span<const std::uint64_t> span(keys.data(), static_cast<std::size_t>(keys.size()));
  const auto row_bytes = static_cast<std::uint32_t>(rows.shape(1));
  std::size_t at = 0, stored = 0;
  RunShort([&] {
    at += std::exchange(stored, 0);
    if (slots.has_value()) {
      store.Write(span.subspan(at), data, row_bytes, slots->data() + at, &stored);
    } else {
      store.Write(span.subspan(at), data + at * row_bytes, row_bytes, nullptr, &stored);
    }
  });
}

// Returns (keys, whether there are more keys).
py::tuple NextKeys(Store& store, KeyList& list, std::size_t limit) {
  std::vector<std::uint64_t> keys;
  bool more = false;
  RunShort([&] { more = store.NextKeys(list, limit, keys); });
  return py::make_tuple(Keys(static_cast<py::ssize_t>(keys.size()), keys.data()), more);
}

ScanHolder BeginScan(Store& store, const std::vector<std::uint32_t>& tables) {
  const py::gil_scoped_release release;
  return ScanHolder(store.BeginScan(tables).release());
}

// Returns (keys, rows) of each batch, and no batch at the end.
py::list NextRows(Store& store, Scan& scan) {
  std::vector<ScanBatch> batches;
  RunLong([&] { batches = store.Next(scan); });
  py::list out;
  for (ScanBatch& batch : batches) {
    const auto n = static_cast<py::ssize_t>(batch.keys.size());
    auto rows = Owned(std::move(batch.rows)).reshape({n, static_cast<py::ssize_t>(batch.row_bytes)});
    out.append(py::make_tuple(Owned(std::move(batch.keys)), std::move(rows)));
  }
  return out;
}

std::uint64_t MakeCommit(Store& store, const py::bytes& meta, const std::string& tag) {
  const std::string copy = meta;
  std::uint64_t id = 0;
  RunLong([&] { id = store.Commit(copy, tag); });
  return id;
}

// Returns (id, tag, unix nanoseconds, meta) of each commit.
py::list ToPython(const std::vector<CommitRecord>& commits) {
  py::list out;
  for (const CommitRecord& commit : commits) {
    const py::bytes tag(commit.tag);
    out.append(py::make_tuple(commit.id, tag.attr("decode")("utf-8", "replace"), commit.unix_nanoseconds,
                              py::bytes(commit.meta)));
  }
  return out;
}

py::list ListCommits(Store& store) {
  std::vector<CommitRecord> commits;
  {
    const py::gil_scoped_release release;
    commits = store.Commits();
  }
  return ToPython(commits);
}

py::bytes Meta(Store& store) {
  std::string meta;
  {
    const py::gil_scoped_release release;
    meta = store.Meta();
  }
  return meta;
}

// Returns the same of a store that is not open, and changes nothing.
py::list KeptCommits(const std::string& directory, Env* env) {
  const auto manifest = Manifest::Load(env == nullptr ? PosixEnv() : *env, directory);
  return ToPython(manifest ? manifest->commits : std::vector<CommitRecord>{});
}

py::dict Stats(Store& store) {
  StoreCounters counters;
  {
    const py::gil_scoped_release release;
    counters = store.Stats();
  }
  py::dict out;
  out["rows"] = counters.rows;
  out["live_bytes"] = counters.live_bytes;
  out["disk_bytes"] = counters.disk_bytes;
  out["kept_bytes"] = counters.kept_bytes;
  out["index_bytes"] = counters.index_bytes;
  out["dense_rows"] = counters.dense_rows;
  out["buffer_bytes"] = counters.buffer_bytes;
  out["segments"] = counters.segments;
  out["read_rows"] = counters.read.rows;
  out["read_bytes"] = counters.read.bytes;
  out["read_requests"] = counters.read.requests;
  out["written_rows"] = counters.written_rows;
  out["written_bytes"] = counters.written_bytes;
  out["relocated_rows"] = counters.relocated_rows;
  out["renewed_commits"] = counters.renewed_commits;
  out["snapshot_failures"] = counters.snapshot_failures;
  out["rebuilt_rows"] = counters.rebuilt_rows;
  out["begun_snapshots"] = counters.begun_snapshots;
  out["saved_snapshots"] = counters.saved_snapshots;
  out["merge_gap_bytes"] = counters.read.merge_gap_bytes;
  out["io"] = counters.io;
  out["direct"] = counters.direct;
  return out;
}

}  // namespace

TIERSTORE_BINDINGS(store) {
  py::register_local_exception_translator(&TranslateException);
  m.def("kept_commits", &KeptCommits, py::arg("directory"), py::arg("env") = nullptr);
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Scan, ScanHolder>(m, "NativeScan");
  py::class_<KeyList>(m, "NativeKeys").def(py::init<std::uint32_t>(), py::arg("table"));
  py::class_<Store, StoreHolder>(m, "NativeStore")
      .def(py::init(&Open), py::arg("directory"), py::arg("config"), py::arg("tables"),
           py::arg("env") = nullptr, py::keep_alive<1, 5>())
      .def("read", &Read, py::arg("keys").noconvert(), py::arg("rows").noconvert(),
           py::arg("slots").noconvert() = py::none())
      .def("places", &Places, py::arg("keys").noconvert())
      .def("write", &Write, py::arg("keys").noconvert(), py::arg("rows").noconvert(),
           py::arg("slots").noconvert() = py::none())
      .def(
          "reserve",
          [](Store& store, std::uint32_t table, std::uint32_t row_bytes, std::uint64_t rows) {
            RunShort([&] { store.Reserve(table, row_bytes, rows); });
          },
          py::arg("table"), py::arg("row_bytes"), py::arg("rows"))
      .def("next_keys", &NextKeys, py::arg("keys"), py::arg("limit"))
      .def("count", &Store::Count, py::arg("table"), Release())
      .def("scan", &BeginScan, py::arg("tables"), py::keep_alive<0, 1>())
      .def("next_rows", &NextRows, py::arg("scan"))
      .def("commit", &MakeCommit, py::arg("meta"), py::arg("tag"))
      .def("commits", &ListCommits)
      .def(
          "drop_commit", [](Store& store, std::uint64_t id) { RunLong([&] { store.DropCommit(id); }); },
          py::arg("id"))
      .def("meta", &Meta)
      .def("stats", &Stats)
      .def("compact", [](Store& store) { RunLong([&] { store.Compact(); }); })
      .def("set_cap", &Store::SetCap, py::arg("bytes"), Release())
      .def("close", &Store::Close, Release());
}

}  // namespace tierstore
