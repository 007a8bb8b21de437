// The GPU kernels of several row layouts in the emulator, for tests/cuda.
#include "cuda/tests/emulated_kernels.h"

namespace {
using namespace tierstore::cuda;
using emulator::AddLayout;

// A kernel with faults, which the emulator must find.
void Faulty(const void* args) {
  const auto& a = *static_cast<const LookupRowsArgs*>(args);
  const auto thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (a.n == 0) Store(a.out + thread / 2, 1.0f);                           // two threads write
  if (a.n == 1 && thread == 3) Store(a.out + Load(a.gather.slots), 1.0f);  // past the end
  if (a.n == 2) Store(const_cast<int32_t*>(a.gather.slots) + thread, 1);   // read-only
  if (a.n == 3 && thread % 2 == 0) ShuffleXor(1.0f, 1);                    // half of the threads
  if (a.n == 4) Load(reinterpret_cast<const Word<4>*>(a.out + 1));         // not aligned
  if (a.n == 5) Store(a.out + thread, Load(a.out + (thread + 32) % 64));   // another block's
  uint16_t* const halves = reinterpret_cast<uint16_t*>(a.out);
  if (a.n == 7 && thread == 0) Store(a.out, 1.0f);
  if (a.n == 7 && thread == 1) Store(halves + 1, uint16_t{1});                     // half of the other's word
  if (a.n == 8) Store(halves + thread, uint16_t{1});                               // right
  if (a.n == 6) Store(a.out + thread, ShuffleXor(static_cast<float>(thread), 1));  // right
}

const bool added = [] {
  emulator::AddKernelsOfAnyLayout();
  emulator::AddSomeLayouts();
  emulator::kernels[{"faulty", -1, -1, -1, -1}] = {&Faulty, sizeof(LookupRowsArgs)};
  AddLayout<1, 1>();
  AddLayout<4, 1>();
  AddLayout<4, 4>();
  AddLayout<17, 1>();
  AddLayout<64, 4>();
  AddLayout<64, 1>();
  AddLayout<100, 1>();
  AddLayout<100, 4>();
  AddLayout<300, 1>();
  AddLayout<300, 4>();
  AddLayout<64, 4, kBfloat16>();
  AddLayout<64, 4, kHalf>();
  return true;
}();

std::string error;
}  // namespace

extern "C" {
void forget_arrays() { emulator::machine.arrays.clear(); }

void add_array(const void* begin, std::int64_t bytes, int writable, const char* name) {
  const auto at = reinterpret_cast<std::uintptr_t>(begin);
  auto& arrays = emulator::machine.arrays;
  arrays.push_back({at, at + static_cast<std::uintptr_t>(bytes), writable != 0, name});
  std::sort(arrays.begin(), arrays.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
}

// Returns what went wrong, or an empty text.
const char* launch(const char* name, int dim, int vec, int optimizer, int weights, const void* args,
                   int blocks, int threads, unsigned seed) {
  const auto kernel = emulator::kernels.find({name, dim, vec, optimizer, weights});
  if (kernel == emulator::kernels.end()) return "there is no such kernel";
  error = emulator::Launch(static_cast<unsigned>(blocks), static_cast<unsigned>(threads), seed,
                           [&] { kernel->second.run(args); });
  return error.c_str();
}

std::int64_t size_of(const char* args) {
  const std::map<std::string, std::size_t> sizes = {
      {"MoveRowsArgs", sizeof(MoveRowsArgs)},
      {"LookupPooledArgs", sizeof(LookupPooledArgs)},
      {"LookupRowsArgs", sizeof(LookupRowsArgs)},
      {"WeightGradsArgs", sizeof(WeightGradsArgs)},
      {"BagSharesArgs", sizeof(BagSharesArgs)},
      {"BagShare", sizeof(BagShare)},
      {"UpdateArgs", sizeof(UpdateArgs)},
      {"InitRowsArgs", sizeof(InitRowsArgs)},
      {"SortArgs", sizeof(SortArgs)},
      {"SumsArgs", sizeof(SumsArgs)},
      {"BatchArgs", sizeof(BatchArgs)},
  };
  return static_cast<std::int64_t>(sizes.at(args));
}
}
