// The GPU that is not there: its memory, streams, faults to come, and what was found wrong.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <optional>
#include <sstream>

#include "cuda/tests/emulated_kernels.h"
#include "cuda/tests/fake_streams.h"
#if defined(TIERSTORE_CUDA_H)
#include <cuda.h>
#else
#include "cuda/tests/fake_cuda.h"
#endif

struct CUevent_st {
  tierstore::cuda::fake::MarkerPtr marker;
};
struct CUfunc_st {
  std::string name;
  tierstore::cuda::emulator::Kernel kernel;
};
struct CUmod_st {
  int dim = -1, vec = -1, optimizer = -1, weights = -1;
  std::map<std::string, CUfunc_st> functions;
};
struct CUctx_st {
  int users = 0;
};

namespace tierstore::cuda::fake {

constexpr int kHostPointers = CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;

struct Fault {
  int after;  // so many calls succeed before
  CUresult code;
};

struct Counts {
  std::int64_t launches = 0, copies = 0, host_accesses = 0, whole_waits = 0, prefers_host = 0,
               accessed_by = 0;
};

struct Gpu {
  static constexpr std::size_t kGranularity = 4096;
  std::recursive_mutex mutex;
  int version = 13000, devices = 1, architecture = 90, shares_managed = 1, host_pointers = 1;
  std::size_t total = std::size_t{1} << 30, used = 0;
  CUctx_st context;
  Streams streams;
  Memory memory;
  std::map<std::uintptr_t, std::size_t> device_memory, host_memory, managed_memory, reserved, mapped;
  std::size_t registered = 0;
  std::map<CUmemGenericAllocationHandle, std::size_t> handles;
  std::map<std::uintptr_t, CUmemGenericAllocationHandle> mapped_handles;
  CUmemGenericAllocationHandle next_handle = 1;
  std::size_t events = 0, modules = 0;
  std::map<std::string, Fault> faults;
  std::string failing_kernel, wrong;
  CUresult failed = CUDA_SUCCESS;  // no call succeeds any more
  int capturing = 0;               // so many streams are
  Counts counts;
  std::uint64_t arrays_version = ~std::uint64_t{0};
};
inline Gpu gpu;
inline thread_local std::vector<CUcontext> contexts;
inline thread_local std::int64_t host_waits = 0;
inline thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

inline void Report(const std::string& what) {
  if (!what.empty()) gpu.wrong += what + "\n";
}

// Whether the driver takes a call for unsafe while any stream is capturing, as it takes all that make
// memory, give it back, or ask what is done: the call is refused, and the capture is lost.
inline bool IsUnsafe(const std::string& function) {
  return (function.rfind("cuMem", 0) == 0 && function != "cuMemcpyAsync") || function == "cuEventQuery" ||
         function == "cuEventSynchronize" || function == "cuModuleLoadData";
}

// What every call does first: the error that it returns, if any.
inline CUresult Enter(const char* function, bool needs_context = true) {
  if (gpu.failed != CUDA_SUCCESS) return gpu.failed;
  if (gpu.capturing > 0 && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED && IsUnsafe(function))
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (auto fault = gpu.faults.find(function); fault != gpu.faults.end() && fault->second.after-- == 0) {
    const CUresult code = fault->second.code;
    gpu.faults.erase(fault);
    return code;
  }
  return needs_context && contexts.empty() ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

inline std::uintptr_t AddressOf(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }
inline void* PointerTo(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

inline void TouchRange(std::uintptr_t begin, std::size_t bytes, const Actor& by, bool write) {
  Region* const region = gpu.memory.Find(begin, bytes);
  if (region == nullptr)
    return Report(by.what + " by " + NameOf(by.number) + " accesses memory that is freed or not its own");
  Report(gpu.memory.Touch(region, begin, bytes, by, write));
}

// The host takes the memory away: nobody may be using it.
inline void RemoveRegion(std::uintptr_t begin) {
  const Region& region = gpu.memory.regions().at(begin);
  TouchRange(begin, region.end - begin, gpu.streams.Host("free"), true);
  gpu.memory.Remove(begin);
}

inline void SetArrays() {
  if (gpu.arrays_version == gpu.memory.version()) return;
  gpu.arrays_version = gpu.memory.version();
  emulator::machine.arrays.clear();
  for (const auto& [begin, region] : gpu.memory.regions())
    emulator::machine.arrays.push_back({begin, region.end, true, region.name});
}

inline void RunKernel(const CUfunc_st& function, unsigned blocks, unsigned threads, const char* args,
                      const Actor& by) {
  if (gpu.failed != CUDA_SUCCESS) return;
  if (gpu.failing_kernel == function.name) {
    gpu.failing_kernel.clear(), gpu.failed = CUDA_ERROR_LAUNCH_FAILED;
    return;
  }
  SetArrays();
  const std::string error = emulator::Launch(
      blocks, threads, static_cast<unsigned>((*gpu.streams.random())()), [&] { function.kernel.run(args); });
  std::string first;
  Region* region = nullptr;  // mostly that of the access before
  for (const auto& [address, seen] : emulator::machine.accesses) {
    if (region == nullptr || address < region->begin || address >= region->end)
      region = gpu.memory.Find(address, 1);
    const std::string wrong = gpu.memory.Touch(region, address, 1, by, seen.is_written());
    if (first.empty()) first = wrong;
  }
  Report(first);
  if (!error.empty()) {
    Report(function.name + " by " + NameOf(by.number) + " " + error);
    gpu.failed = CUDA_ERROR_ILLEGAL_ADDRESS;
  }
}

inline void RunCopy(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, const Actor& by) {
  TouchRange(from, bytes, by, false);
  TouchRange(to, bytes, by, true);
  if (gpu.failed == CUDA_SUCCESS && gpu.memory.Find(from, bytes) != nullptr &&
      gpu.memory.Find(to, bytes) != nullptr)
    std::memcpy(PointerTo(to), PointerTo(from), bytes);
}

}  // namespace tierstore::cuda::fake
