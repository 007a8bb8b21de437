// Defines the Python module tierstore._core, the native core, which knows nothing of torch. The core takes
// pointers (as integers or NumPy arrays), sizes and strides; the Python layer above checks dtypes, devices
// and shapes.
#include "bindings/registry.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "Native core of tierstore.";
  for (tierstore::BindFunction bind : tierstore::BindFunctions()) bind(m);
}
