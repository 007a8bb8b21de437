// Each area of the core (kernels, cache, store) has files of bindings that register themselves here, so that
// a new area touches no shared file:
//
//   TIERSTORE_BINDINGS(cache) { m.def(...); }
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>
#include <vector>

namespace tierstore {

using BindFunction = void (*)(pybind11::module_&);

inline std::vector<BindFunction>& BindFunctions() {
  static std::vector<BindFunction> functions;
  return functions;
}

struct RegisterBindings {
  explicit RegisterBindings(BindFunction function) { BindFunctions().push_back(function); }
};

}  // namespace tierstore

#define TIERSTORE_BINDINGS(area)                                            \
  static void Bind_##area(pybind11::module_& m);                            \
  static const ::tierstore::RegisterBindings register_##area(&Bind_##area); \
  static void Bind_##area([[maybe_unused]] pybind11::module_& m)
