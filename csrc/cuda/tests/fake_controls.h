// How tests set up the fake driver, and what they ask it; included by fake_driver.cc alone.
#pragma once

#include "cuda/tests/fake_machine.h"

extern "C" {
using tierstore::cuda::fake::gpu;
namespace fake_controls = tierstore::cuda::fake;

// After a failure nothing can be given back: the driver does it, at the end of the process.
void fake_forget() {
  for (const auto& [address, bytes] : gpu.device_memory) std::free(fake_controls::PointerTo(address));
  for (const auto& [address, bytes] : gpu.host_memory) std::free(fake_controls::PointerTo(address));
  for (const auto& [address, bytes] : gpu.managed_memory) std::free(fake_controls::PointerTo(address));
  for (const auto& [address, bytes] : gpu.reserved) munmap(fake_controls::PointerTo(address), bytes);
  gpu.device_memory.clear(), gpu.host_memory.clear(), gpu.managed_memory.clear(), gpu.registered = 0;
  gpu.reserved.clear(), gpu.mapped.clear();
  gpu.handles.clear(), gpu.mapped_handles.clear();
  gpu.memory = {}, gpu.streams = {}, gpu.arrays_version = ~std::uint64_t{0};
  gpu.used = gpu.events = gpu.modules = 0, gpu.context.users = 0, gpu.capturing = 0;
}

// Begins a test: what was found and counted before is forgotten.
void fake_begin(int order, unsigned seed, int starved) {
  const std::lock_guard<std::recursive_mutex> lock(gpu.mutex);
  if (gpu.failed != CUDA_SUCCESS) fake_forget();
  gpu.streams.SetOrder(static_cast<fake_controls::Order>(order), seed, static_cast<std::size_t>(starved));
  gpu.wrong.clear(), gpu.faults.clear(), gpu.failing_kernel.clear();
  gpu.counts = {}, gpu.failed = CUDA_SUCCESS;
  gpu.version = 13000, gpu.devices = 1, gpu.architecture = 90, gpu.total = std::size_t{1} << 30;
  gpu.shares_managed = gpu.host_pointers = 1;
  tierstore::cuda::emulator::machine.is_pageable = false;
}
void fake_set_driver(int version, int devices, int architecture) {
  gpu.version = version, gpu.devices = devices, gpu.architecture = architecture;
}
void fake_set_memory(std::size_t total) { gpu.total = total; }
// Whether the host may use managed memory while kernels run.
void fake_set_shares_managed(int shares) { gpu.shares_managed = shares; }
// Whether kernels reach registered memory at the host's addresses.
void fake_set_host_pointers(int same) { gpu.host_pointers = same; }
void fake_set_pageable() { tierstore::cuda::emulator::machine.is_pageable = true; }
void fake_set_capturing(CUstream stream, int capturing) {
  auto* const chosen =
      stream == nullptr ? gpu.streams.Default() : reinterpret_cast<fake_controls::Stream*>(stream);
  gpu.capturing += (capturing != 0) - chosen->capturing;
  chosen->capturing = capturing != 0;
}
// The call of this function after `after` others returns this error.
void fake_fail(const char* function, int after, int code) {
  gpu.faults[function] = {after, static_cast<CUresult>(code)};
}
// The kernel fails when it runs next; then no call succeeds any more.
void fake_fail_kernel(const char* kernel) { gpu.failing_kernel = kernel; }

// Runs all that a stream was given; the host does not wait for it, so nothing is ordered by it.
void fake_run(CUstream stream) {
  const std::lock_guard<std::recursive_mutex> lock(gpu.mutex);
  auto* const given = reinterpret_cast<fake_controls::Stream*>(stream);
  gpu.streams.Drain(given == nullptr ? gpu.streams.Default() : given);
}
// The host reads or writes memory that streams access, too.
void fake_touch(const void* address, std::size_t bytes, int write) {
  const std::lock_guard<std::recursive_mutex> lock(gpu.mutex);
  ++gpu.counts.host_accesses;
  fake_controls::TouchRange(fake_controls::AddressOf(address), bytes, gpu.streams.Host("an access"),
                            write != 0);
}

// Whether no call succeeds any more.
int fake_failed() { return gpu.failed != CUDA_SUCCESS; }
// What was found wrong, a line each.
const char* fake_wrong() {
  static std::string text;
  const std::lock_guard<std::recursive_mutex> lock(gpu.mutex);
  return (text = gpu.wrong).c_str();
}
// How often this thread has waited for the GPU.
std::int64_t fake_waits() { return fake_controls::host_waits; }
// Launches, copies, accesses of the host that were told, waits for the whole device, advices of managed
// memory.
void fake_counts(std::int64_t* counts) {
  const auto& c = gpu.counts;
  counts[0] = c.launches, counts[1] = c.copies, counts[2] = c.host_accesses, counts[3] = c.whole_waits;
  counts[4] = c.prefers_host, counts[5] = c.accessed_by;
}
// What is allocated: bytes of device memory; all other objects.
void fake_alive(std::int64_t* alive) {
  alive[0] = static_cast<std::int64_t>(gpu.used);
  alive[1] = static_cast<std::int64_t>(gpu.host_memory.size() + gpu.managed_memory.size() + gpu.registered +
                                       gpu.reserved.size() + gpu.mapped.size() + gpu.handles.size() +
                                       gpu.streams.size() + gpu.events + gpu.modules) +
             gpu.context.users;
}
}
