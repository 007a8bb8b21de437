// Bindings of rows and kernels, compiled as one file: alone, each would take ten seconds for what pybind11's
// headers bring along. Units are linked in the order of their names, and files register in this order: types
// come before the functions that take them.
#include "bindings/cache.cc"
#include "bindings/exchange.cc"
#include "bindings/host_memory.cc"
#include "bindings/kernels.cc"
#include "bindings/row_arguments.cc"
#include "bindings/row_codec.cc"
#include "bindings/rows.cc"
