// Binds descriptors that no forked child keeps.
#include "common/fork.h"

#include <fcntl.h>

#include "bindings/registry.h"

namespace py = pybind11;

namespace tierstore {
namespace {

OwnDescriptor OpenOwn(const std::string& path, int flags, int mode) {
  OwnDescriptor descriptor;
  {
    const py::gil_scoped_release release;
    descriptor = OwnDescriptor([&] { return open(path.c_str(), flags | O_CLOEXEC, mode); });
  }
  if (descriptor.error() != 0) {
    errno = descriptor.error();
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
    throw py::error_already_set();
  }
  return descriptor;
}

}  // namespace

TIERSTORE_BINDINGS(fork) {
  m.def("fork_count", &ForkCount,
        "Return the number of forks between this process and the process that imported the core.");
  py::class_<OwnDescriptor>(m, "OwnDescriptor",
                            "A descriptor that is closed in every forked child, whatever code forks.")
      .def(py::init(&OpenOwn), py::arg("path"), py::arg("flags"), py::arg("mode") = 0666)
      .def("fileno", &OwnDescriptor::value, "Return the descriptor, or -1 when the descriptor is closed.")
      .def("close", &OwnDescriptor::Close);
}

}  // namespace tierstore
