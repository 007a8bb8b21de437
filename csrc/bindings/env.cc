// Binds the Env that changes nothing, and the Envs that stand in for a file system in tests.
#include "io/env.h"

#include "bindings/registry.h"
#include "io/device_probe.h"
#include "io/fault_env.h"
#include "io/memory_env.h"
#include "io/read_only_env.h"
#include "store/striped_env.h"

namespace py = pybind11;

namespace tierstore {
namespace {

MemoryEnv::Unsynced ParseUnsynced(const std::string& name) {
  if (name == "lost") return MemoryEnv::Unsynced::kLost;
  if (name == "kept") return MemoryEnv::Unsynced::kKept;
  if (name == "random") return MemoryEnv::Unsynced::kRandom;
  throw py::value_error("unsynced must be 'lost', 'kept' or 'random'");
}

py::bytes Contents(MemoryEnv& env, const std::string& path) {
  const std::vector<std::byte> data = env.Contents(path);
  return {reinterpret_cast<const char*>(data.data()), data.size()};
}

void SetContents(MemoryEnv& env, const std::string& path, const py::bytes& contents) {
  const std::string_view view = contents;
  const auto* data = reinterpret_cast<const std::byte*>(view.data());
  env.SetContents(path, {data, data + view.size()});
}

}  // namespace

TIERSTORE_BINDINGS(env) {
  m.def(
      "probe_reads",
      [](const std::string& path, std::uint32_t block_bytes, unsigned queue_depth, double seconds) {
        if (block_bytes == 0 || block_bytes % kBlockBytes != 0 || block_bytes > kMaxReadBytes)
          throw py::value_error("block_bytes must be a multiple of 4096 up to 65536");
        return ProbeReads(PosixEnv(), path, block_bytes, queue_depth, seconds);
      },
      py::arg("path"), py::arg("block_bytes"), py::arg("queue_depth"), py::arg("seconds"),
      py::call_guard<py::gil_scoped_release>());
  py::class_<Env>(m, "Env").def("close", &Env::Close);
  m.def("posix_env", &NewPosixEnv, py::arg("directory"));
  py::class_<MemoryEnv, Env>(m, "MemoryEnv")
      .def(py::init<>())
      .def("list", &MemoryEnv::List, py::arg("directory"))
      .def("operations", &MemoryEnv::operations)
      .def(
          "after_crash",
          [](MemoryEnv& env, std::size_t operations, const std::string& unsynced, std::uint64_t seed,
             const std::string& keeps) {
            return env.AfterCrash(operations, ParseUnsynced(unsynced), seed, keeps);
          },
          py::arg("operations"), py::arg("unsynced"), py::arg("seed") = 0, py::arg("keeps") = "")
      .def("contents", &Contents, py::arg("path"))
      .def("set_contents", &SetContents, py::arg("path"), py::arg("contents"))
      .def("remove", &MemoryEnv::Remove, py::arg("path"));
  py::class_<ReadOnlyEnv, Env>(m, "ReadOnlyEnv")
      .def(py::init(
               [](Env* base) { return std::make_unique<ReadOnlyEnv>(base == nullptr ? PosixEnv() : *base); }),
           py::arg("base") = nullptr, py::keep_alive<1, 2>());
  py::class_<FaultEnv, Env>(m, "FaultEnv")
      .def(py::init<Env&, unsigned>(), py::arg("base"), py::arg("at_once") = 0, py::keep_alive<1, 2>())
      .def("fail", &FaultEnv::Fail, py::arg("kind"), py::arg("nth"), py::arg("errno"),
           py::arg("forever") = false)
      .def("set_capacity", &FaultEnv::SetCapacity, py::arg("bytes"))
      .def("flip_bits", &FaultEnv::FlipBits, py::arg("every_nth_read"))
      .def("shorten_reads", &FaultEnv::ShortenReads, py::arg("every_nth_read"))
      .def("slow_down", &FaultEnv::SlowDown, py::arg("seconds_per_operation"))
      .def("heal", &FaultEnv::Heal)
      .def("counts", &FaultEnv::Counts)
      .def("most_at_once", &FaultEnv::MostAtOnce);
  // `folders` has (Env, path) of each folder, and lives as long as the StripedEnv.
  py::class_<StripedEnv, Env>(m, "StripedEnv")
      .def(py::init([](const py::list& folders, std::uint32_t stripe_bytes) {
             std::vector<StripeFolder> parsed;
             for (const py::handle folder : folders) {
               const auto pair = folder.cast<std::pair<Env*, std::string>>();
               parsed.push_back({pair.first, pair.second});
             }
             return std::make_unique<StripedEnv>(std::move(parsed), stripe_bytes);
           }),
           py::arg("folders"), py::arg("stripe_bytes") = Chunk::kBytes, py::keep_alive<1, 2>());
}

}  // namespace tierstore
