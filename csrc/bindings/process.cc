// What the core does to the process as a whole.
#include <cstdlib>

#include "bindings/registry.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace {

// glibc raises the size from which blocks are mapped on their own, up to 32 MiB, each time that such a block
// is freed. The few MiB that every batch takes and frees then scatter over the heap, which keeps about twice
// what is in use.
bool FixMallocThreshold([[maybe_unused]] int bytes) {
#ifdef __GLIBC__
  return std::getenv("MALLOC_MMAP_THRESHOLD_") == nullptr && mallopt(M_MMAP_THRESHOLD, bytes) == 1;
#else
  return false;
#endif
}

}  // namespace

TIERSTORE_BINDINGS(process) {
  m.def("fix_malloc_threshold", &FixMallocThreshold, pybind11::arg("bytes"),
        "Blocks of so many bytes and more go back to the system when freed, from now on and in the whole "
        "process. "
        "False where the user has chosen a size, or malloc is not glibc's.");
}
