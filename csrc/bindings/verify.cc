// Binds the store's verification. tierstore/store/verification.py says what the findings mean.
#include "store/verify.h"

#include <pybind11/functional.h>

#include "bindings/registry.h"
#include "common/fork.h"
#include "store/errors.h"

namespace py = pybind11;

namespace tierstore {
namespace {

VerifyReport Verify(const std::string& directory, const std::map<std::uint32_t, std::uint32_t>& row_bytes,
                    const std::function<void(std::uint64_t, std::uint64_t)>& progress, Env* env) {
  const unsigned forks = ForkCount();
  const auto tell = [&](std::uint64_t done, std::uint64_t total) {
    py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (progress) progress(done, total);
    if (forks != ForkCount()) throw ClosedError("this process was forked while it verified a store");
  };
  py::gil_scoped_release release;
  return VerifyStore(env == nullptr ? PosixEnv() : *env, directory, row_bytes, tell);
}

}  // namespace

TIERSTORE_BINDINGS(verify) {
  py::class_<Finding>(m, "Finding")
      .def_readonly("file", &Finding::file)
      .def_readonly("offset", &Finding::offset)
      .def_readonly("bytes", &Finding::bytes)
      .def_property_readonly(
          "what",
          [](const Finding& finding) { return py::bytes(finding.what).attr("decode")("utf-8", "replace"); })
      .def_readonly("lost", &Finding::lost)
      .def_readonly("commits", &Finding::commits)
      .def_readonly("tables", &Finding::tables)
      .def_readonly("keys", &Finding::keys);
  py::class_<VerifyReport>(m, "VerifyReport")
      .def_readonly("findings", &VerifyReport::findings)
      .def_readonly("findings_total", &VerifyReport::findings_total)
      .def_readonly("files", &VerifyReport::files)
      .def_readonly("bytes", &VerifyReport::bytes)
      .def_readonly("records", &VerifyReport::records)
      .def_readonly("voids", &VerifyReport::voids)
      .def_readonly("commits", &VerifyReport::commits)
      .def_readonly("index_entries", &VerifyReport::index_entries)
      .def_readonly("leftovers", &VerifyReport::leftovers)
      .def_property_readonly("foreign", [](const VerifyReport& report) {
        py::list names;
        for (const std::string& name : report.foreign)
          names.append(py::bytes(name).attr("decode")("utf-8", "replace"));
        return names;
      });
  m.def("verify_store", &Verify, py::arg("directory"), py::arg("row_bytes"), py::arg("progress") = nullptr,
        py::arg("env") = nullptr);
}

}  // namespace tierstore
