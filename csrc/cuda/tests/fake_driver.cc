// A libcuda.so.1 without a GPU, for tests: it runs the kernels in the emulator, in an adversary's order, and
// checks that accesses to the same memory are ordered (happens_before.h), that nothing accesses memory that
// is not allocated, and that nobody waits for the whole device. It has the calls that tierstore makes, no
// others.
#include "cuda/tests/driver_numbers.h"
#include "cuda/tests/fake_controls.h"
#include "cuda/tests/fake_machine.h"

using namespace tierstore::cuda;
using fake::gpu;

#define FAKE_ENTER(name, ...)                                  \
  const std::lock_guard<std::recursive_mutex> lock(gpu.mutex); \
  if (const CUresult code = fake::Enter(name, ##__VA_ARGS__); code != CUDA_SUCCESS) return code
#define FAKE_REQUIRE(condition) \
  if (!(condition)) return CUDA_ERROR_INVALID_VALUE

namespace {

const bool added = [] {
  emulator::AddKernelsOfAnyLayout();
  emulator::AddSomeLayouts();
  return true;
}();

// Stream 0 waits for streams that were made without CU_STREAM_NON_BLOCKING alone, and there are none.
fake::Stream* Of(CUstream stream) {
  return stream == nullptr ? gpu.streams.Default() : reinterpret_cast<fake::Stream*>(stream);
}

bool Take(std::size_t bytes) {
  if (bytes > gpu.total - gpu.used) return false;
  gpu.used += bytes;
  return true;
}

void* Fresh(std::size_t bytes) {
  const std::size_t rounded = (bytes + 511) / 512 * 512;
  void* const memory = std::aligned_alloc(512, rounded);
  std::memset(memory, 0xee, rounded);
  return memory;
}

// Frees what `allocations` has at this address; the driver waits for all work before it does.
CUresult Free(std::map<std::uintptr_t, std::size_t>* allocations, std::uintptr_t address) {
  const auto found = allocations->find(address);
  FAKE_REQUIRE(found != allocations->end());
  if (!gpu.streams.idle()) ++gpu.counts.whole_waits;
  fake::RemoveRegion(address);
  if (allocations == &gpu.device_memory) gpu.used -= found->second;
  std::free(fake::PointerTo(address));
  allocations->erase(found);
  return CUDA_SUCCESS;
}

int Number(const std::string& options, const std::string& name) {
  const std::size_t at = options.find(name + "=");
  return at == std::string::npos ? -1 : std::atoi(options.c_str() + at + name.size() + 1);
}

bool IsFunctionOf(const CUmod_st& part, const std::string& name) {
  const bool of_update = name.rfind("update_", 0) == 0;
  const bool of_lookup = name.rfind("lookup_", 0) == 0 || name == "weight_grads";
  return of_update == (part.optimizer >= 0) && of_lookup == (part.dim >= 0 && part.optimizer < 0);
}

}  // namespace

extern "C" {
CUresult CUDAAPI cuInit(unsigned) {
  FAKE_ENTER("cuInit", false);
  return gpu.devices == 0 ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}
CUresult CUDAAPI cuDriverGetVersion(int* version) {
  *version = gpu.version;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuGetErrorName(CUresult error, const char** name) {
  static const std::map<CUresult, const char*> kNames = {
      {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
      {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
      {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
      {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
      {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
      {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"}};
  const auto found = kNames.find(error);
  if (found == kNames.end()) return CUDA_ERROR_INVALID_VALUE;
  *name = found->second;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
  FAKE_ENTER("cuDeviceGetCount", false);
  *count = gpu.devices;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  FAKE_ENTER("cuDeviceGet", false);
  if (ordinal < 0 || ordinal >= gpu.devices) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGetName(char* name, int size, CUdevice) {
  FAKE_ENTER("cuDeviceGetName", false);
  std::snprintf(name, static_cast<std::size_t>(size), "fake GPU");
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  FAKE_ENTER("cuDeviceGetAttribute", false);
  const std::map<int, int> values = {{CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 4},
                                     {fake::kHostPointers, gpu.host_pointers},
                                     {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
                                     {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, gpu.architecture / 10},
                                     {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, gpu.architecture % 10},
                                     {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, gpu.shares_managed},
                                     {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1}};
  FAKE_REQUIRE(values.count(attribute) != 0);
  *value = values.at(attribute);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  FAKE_ENTER("cuDevicePrimaryCtxRetain", false);
  ++gpu.context.users;
  *context = &gpu.context;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice) {
  FAKE_ENTER("cuDevicePrimaryCtxRelease", false);
  FAKE_REQUIRE(gpu.context.users-- > 0);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
  FAKE_REQUIRE(context == &gpu.context && gpu.context.users > 0);
  fake::contexts.push_back(context);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxPopCurrent(CUcontext* context) {
  FAKE_REQUIRE(!fake::contexts.empty());
  *context = fake::contexts.back();
  fake::contexts.pop_back();
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  FAKE_ENTER("cuCtxGetStreamPriorityRange");
  *least = 0, *greatest = -5;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetInfo(std::size_t* free, std::size_t* total) {
  FAKE_ENTER("cuMemGetInfo");
  *free = gpu.total - gpu.used, *total = gpu.total;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemAlloc(CUdeviceptr* address, std::size_t bytes) {
  FAKE_ENTER("cuMemAlloc");
  FAKE_REQUIRE(bytes > 0);
  if (!Take(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = fake::AddressOf(Fresh(bytes));
  gpu.device_memory[*address] = bytes;
  gpu.memory.Add(*address, bytes, "device memory");
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemFree(CUdeviceptr address) {
  FAKE_ENTER("cuMemFree");
  return Free(gpu.managed_memory.count(address) != 0 ? &gpu.managed_memory : &gpu.device_memory, address);
}
CUresult CUDAAPI cuMemHostAlloc(void** address, std::size_t bytes, unsigned) {
  FAKE_ENTER("cuMemHostAlloc");
  FAKE_REQUIRE(bytes > 0);
  *address = Fresh(bytes);
  gpu.host_memory[fake::AddressOf(*address)] = bytes;
  gpu.memory.Add(fake::AddressOf(*address), bytes, "pinned memory");
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemFreeHost(void* address) {
  FAKE_ENTER("cuMemFreeHost");
  return Free(&gpu.host_memory, fake::AddressOf(address));
}
CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr* address, std::size_t bytes, unsigned flags) {
  FAKE_ENTER("cuMemAllocManaged");
  FAKE_REQUIRE(bytes > 0 && flags == CU_MEM_ATTACH_GLOBAL);
  *address = fake::AddressOf(Fresh(bytes));
  gpu.managed_memory[*address] = bytes;
  gpu.memory.Add(*address, bytes, "managed memory");
  return CUDA_SUCCESS;
}
#undef cuMemAdvise  // the call that drivers of every CUDA have
CUresult CUDAAPI cuMemAdvise(CUdeviceptr address, std::size_t bytes, CUmem_advise advice, CUdevice device) {
  FAKE_ENTER("cuMemAdvise");
  FAKE_REQUIRE(gpu.managed_memory.count(address) != 0 && gpu.managed_memory[address] == bytes);
  const bool prefers = advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION;
  FAKE_REQUIRE(prefers ? device == CU_DEVICE_CPU : device >= 0 && device < gpu.devices);
  ++(prefers ? gpu.counts.prefers_host : gpu.counts.accessed_by);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemHostRegister(void* address, std::size_t bytes, unsigned) {
  FAKE_ENTER("cuMemHostRegister");
  FAKE_REQUIRE(bytes > 0);
  gpu.registered += bytes;
  gpu.memory.Add(fake::AddressOf(address), bytes, "registered memory");
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemHostUnregister(void* address) {
  FAKE_ENTER("cuMemHostUnregister");
  FAKE_REQUIRE(gpu.memory.regions().count(fake::AddressOf(address)) != 0);
  const auto& region = gpu.memory.regions().at(fake::AddressOf(address));
  gpu.registered -= region.end - region.begin;
  fake::RemoveRegion(fake::AddressOf(address));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp* prop,
                                               CUmemAllocationGranularity_flags) {
  FAKE_ENTER("cuMemGetAllocationGranularity");
  FAKE_REQUIRE(prop->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
               prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE);
  *granularity = fake::Gpu::kGranularity;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* address, std::size_t bytes, std::size_t, CUdeviceptr,
                                     unsigned long long) {
  FAKE_ENTER("cuMemAddressReserve");
  FAKE_REQUIRE(bytes > 0 && bytes % fake::Gpu::kGranularity == 0);
  void* const space = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = fake::AddressOf(space);
  gpu.reserved[*address] = bytes;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, std::size_t bytes) {
  FAKE_ENTER("cuMemAddressFree");
  FAKE_REQUIRE(gpu.reserved.count(address) != 0 && gpu.reserved[address] == bytes);
  const auto mapped = gpu.mapped.lower_bound(address);
  FAKE_REQUIRE(mapped == gpu.mapped.end() || mapped->first >= address + bytes);
  munmap(fake::PointerTo(address), bytes);
  gpu.reserved.erase(address);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                             const CUmemAllocationProp* prop, unsigned long long) {
  FAKE_ENTER("cuMemCreate");
  FAKE_REQUIRE(bytes > 0 && bytes % fake::Gpu::kGranularity == 0 && prop->location.id < gpu.devices);
  if (!Take(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = gpu.next_handle++;
  gpu.handles[*handle] = bytes;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  FAKE_ENTER("cuMemRelease");
  FAKE_REQUIRE(gpu.handles.count(handle) != 0);
  for (const auto& [address, of] : gpu.mapped_handles) FAKE_REQUIRE(of != handle);
  gpu.used -= gpu.handles[handle];
  gpu.handles.erase(handle);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemMap(CUdeviceptr address, std::size_t bytes, std::size_t offset,
                          CUmemGenericAllocationHandle handle, unsigned long long) {
  FAKE_ENTER("cuMemMap");
  FAKE_REQUIRE(offset == 0 && gpu.handles.count(handle) != 0 && gpu.handles[handle] == bytes);
  const auto after = gpu.reserved.upper_bound(address);
  FAKE_REQUIRE(after != gpu.reserved.begin());
  const auto& [begin, size] = *std::prev(after);
  FAKE_REQUIRE(address + bytes <= begin + size);
  const auto next = gpu.mapped.lower_bound(address);
  FAKE_REQUIRE(next == gpu.mapped.end() || address + bytes <= next->first);
  FAKE_REQUIRE(next == gpu.mapped.begin() || std::prev(next)->first + std::prev(next)->second <= address);
  gpu.mapped[address] = bytes, gpu.mapped_handles[address] = handle;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* access,
                                std::size_t count) {
  FAKE_ENTER("cuMemSetAccess");
  FAKE_REQUIRE(count == 1 && access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  FAKE_REQUIRE(gpu.mapped.count(address) != 0 && gpu.mapped[address] == bytes);
  mprotect(fake::PointerTo(address), bytes, PROT_READ | PROT_WRITE);
  std::memset(fake::PointerTo(address), 0xee, bytes);
  gpu.memory.Add(address, bytes, "rows");
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, std::size_t bytes) {
  FAKE_ENTER("cuMemUnmap");
  FAKE_REQUIRE(gpu.mapped.count(address) != 0 && gpu.mapped[address] == bytes);
  if (gpu.memory.regions().count(address) != 0) fake::RemoveRegion(address);
  madvise(fake::PointerTo(address), bytes, MADV_DONTNEED);
  mprotect(fake::PointerTo(address), bytes, PROT_NONE);
  gpu.mapped.erase(address), gpu.mapped_handles.erase(address);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int) {
  FAKE_ENTER("cuStreamCreateWithPriority");
  FAKE_REQUIRE(flags == CU_STREAM_NON_BLOCKING);
  fake::Stream* const made = gpu.streams.Create();
  if (made == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *stream = reinterpret_cast<CUstream>(made);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuStreamDestroy(CUstream stream) {
  FAKE_ENTER("cuStreamDestroy");
  gpu.streams.Destroy(Of(stream));
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  FAKE_ENTER("cuStreamIsCapturing");
  *status = Of(stream)->capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  std::swap(*mode, fake::capture_mode);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  FAKE_ENTER("cuStreamWaitEvent");
  if (event->marker != nullptr) gpu.streams.Wait(Of(stream), event->marker);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventCreate(CUevent* event, unsigned) {
  FAKE_ENTER("cuEventCreate");
  *event = new CUevent_st;
  ++gpu.events;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuEventDestroy(CUevent event) {
  FAKE_ENTER("cuEventDestroy");
  delete event;
  --gpu.events;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) {
  FAKE_ENTER("cuEventRecord");
  event->marker = gpu.streams.Record(Of(stream));
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuEventQuery(CUevent event) {
  FAKE_ENTER("cuEventQuery");
  if (event->marker == nullptr) return CUDA_SUCCESS;
  if (!event->marker->done) return CUDA_ERROR_NOT_READY;
  gpu.streams.Synchronize(event->marker);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuEventSynchronize(CUevent event) {
  FAKE_ENTER("cuEventSynchronize");
  if (event->marker != nullptr) fake::host_waits += gpu.streams.Synchronize(event->marker);
  return gpu.failed;
}

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  FAKE_ENTER("cuMemcpyAsync");
  FAKE_REQUIRE(gpu.memory.Find(from, bytes) != nullptr && gpu.memory.Find(to, bytes) != nullptr);
  ++gpu.counts.copies;
  gpu.streams.Launch(Of(stream), "a copy",
                     [=](const fake::Actor& by) { fake::RunCopy(to, from, bytes, by); });
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* image) {
  FAKE_ENTER("cuModuleLoadData");
  const std::string options(static_cast<const char*>(image));
  if (options.rfind("fake cubin\n", 0) != 0) return CUDA_ERROR_INVALID_IMAGE;
  if (options.find("sm_" + std::to_string(gpu.architecture) + "\n") == std::string::npos)
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  const auto number = [&](const char* name) { return Number(options, name); };
  *module = new CUmod_st{number("_DIM"), number("_VEC"), number("_OPTIMIZER"), number("_WEIGHTS"), {}};
  ++gpu.modules;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuModuleUnload(CUmodule module) {
  FAKE_ENTER("cuModuleUnload");
  delete module;
  --gpu.modules;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  FAKE_ENTER("cuModuleGetFunction");
  const auto kernel =
      emulator::kernels.find({name, module->dim, module->vec, module->optimizer, module->weights});
  if (kernel == emulator::kernels.end() || !IsFunctionOf(*module, name)) return CUDA_ERROR_NOT_FOUND;
  *function = &(module->functions[name] = {name, kernel->second});
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned blocks, unsigned blocks_y, unsigned blocks_z,
                                unsigned threads, unsigned threads_y, unsigned threads_z, unsigned shared,
                                CUstream stream, void** args, void** extra) {
  FAKE_ENTER("cuLaunchKernel");
  FAKE_REQUIRE(blocks > 0 && blocks_y == 1 && blocks_z == 1 && threads_y == 1 && threads_z == 1);
  FAKE_REQUIRE(threads > 0 && threads <= 256 && threads % kWarp == 0 && shared == 0 && extra == nullptr);
  const char* const given = static_cast<const char*>(args[0]);
  const std::vector<char> copy(given, given + function->kernel.args_bytes);
  ++gpu.counts.launches;
  const CUfunc_st kernel = *function;
  gpu.streams.Launch(Of(stream), kernel.name, [=](const fake::Actor& by) {
    fake::RunKernel(kernel, blocks, threads, copy.data(), by);
  });
  return CUDA_SUCCESS;
}
}
