// The GPU kernels of the row layouts that all libraries of tests have; they are compiled once for all.
#include "cuda/tests/emulated_kernels.h"

namespace tierstore::cuda::emulator {
namespace {

template <int kType>
void AddSomeOfType() {
  AddLayout<3, 1, kType>();
  AddLayout<8, 1, kType>();
  AddLayout<8, 4, kType>();
  AddLayout<20, 1, kType>();
  AddLayout<20, 4, kType>();
  AddLayout<32, 1, kType>();
  AddLayout<32, 4, kType>();
}

}  // namespace

void AddSomeLayouts() {
  AddSomeOfType<kFloat32>();
  AddSomeOfType<kBfloat16>();
  AddSomeOfType<kHalf>();
}

}  // namespace tierstore::cuda::emulator
