// Runs device code on the CPU: one fiber for each thread of a warp, which meet at shuffles. Between two
// shuffles the threads of a warp run one after the other, in a random order; so do warps and blocks.
//
// Reported as errors: a shuffle that not all threads of a warp make; an access outside of the arrays of the
// launch, to a read-only one, or not aligned; two threads that access the same memory when one of them
// writes. No kernel here shares memory between threads, so no order of theirs makes the latter right.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/args.h"

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace tierstore::cuda::emulator {

// An array that a kernel may access.
struct Array {
  std::uintptr_t begin, end;
  bool writable;
  std::string name;
};

// The threads that accessed a word of 4 bytes: none, one, or kMany of each of its halves.
struct Accesses {
  static constexpr std::int64_t kNone = -1, kMany = -2;
  std::array<std::int64_t, 2> reader{kNone, kNone}, writer{kNone, kNone};

  bool is_written() const { return writer[0] != kNone || writer[1] != kNone; }
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done, waits;
  std::uint64_t sent, got;
  int from;
};

struct Machine {
  static constexpr std::size_t kStack = std::size_t{128} << 10;
  std::vector<Array> arrays;  // by address
  bool is_pageable = false;   // memory outside of the arrays may be accessed, and is not checked
  std::unordered_map<std::uintptr_t, Accesses> accesses;
  std::array<Fiber, kWarp> fibers;
  ucontext_t main;
  int current = 0;
  std::function<void()> body;
  std::string error;  // the first one; its kernel does not go on
};
inline Machine machine;

// Threads that fail do not go on.
inline void Fail(const std::string& what) {
  if (machine.error.empty())
    machine.error =
        what + " (block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(threadIdx.x) + ")";
  swapcontext(&machine.fibers[static_cast<std::size_t>(machine.current)].context, &machine.main);
}

inline void Access(const void* address, std::size_t bytes, std::size_t alignment, bool write) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const char* const verb = write ? "writes " : "reads ";
  auto array = std::upper_bound(machine.arrays.begin(), machine.arrays.end(), at,
                                [](std::uintptr_t place, const Array& one) { return place < one.begin; });
  const bool outside = array == machine.arrays.begin() || at + bytes > std::prev(array)->end;
  if (outside && machine.is_pageable) return;
  if (outside) return Fail(verb + std::to_string(bytes) + " bytes outside of every array");
  --array;
  const std::string where = array->name + " at byte " + std::to_string(at - array->begin);
  if (write && !array->writable) return Fail("writes to the read-only " + where);
  if (at % alignment != 0)
    return Fail(verb + where + ", which is not aligned to " + std::to_string(alignment));
  const std::int64_t me = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::size_t unit = bytes % 4 == 0 ? 4 : bytes;  // a byte by itself counts as the half that it begins
  const std::size_t first = bytes == 2 ? at / 2 % 2 : 0, last = bytes % 4 == 0 ? 1 : first;
  for (std::size_t i = 0; i < bytes; i += unit) {
    Accesses& seen = machine.accesses[bytes == 2 ? at - 2 * first : at + i];
    const auto other = [me](std::int64_t thread) { return thread != Accesses::kNone && thread != me; };
    for (std::size_t half = first; half <= last; ++half) {
      if (other(seen.writer[half]) || (write && other(seen.reader[half])))
        return Fail(verb + where + ", which another thread " +
                    (other(seen.writer[half]) ? "writes" : "reads"));
      std::int64_t& mine = write ? seen.writer[half] : seen.reader[half];
      mine = mine == Accesses::kNone || mine == me ? me : Accesses::kMany;
    }
  }
}

template <typename T>
T Shuffle(T value, int from) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  Fiber& mine = machine.fibers[static_cast<std::size_t>(machine.current)];
  std::memcpy(&mine.sent, &value, sizeof value);
  mine.from = from;
  mine.waits = true;
  swapcontext(&mine.context, &machine.main);
  T got;
  std::memcpy(&got, &mine.got, sizeof got);
  return got;
}

inline void Enter() {
  machine.body();
  machine.fibers[static_cast<std::size_t>(machine.current)].done = true;
  swapcontext(&machine.fibers[static_cast<std::size_t>(machine.current)].context, &machine.main);
}

inline void Start(Fiber* fiber) {
  if (!fiber->stack) fiber->stack.reset(new char[Machine::kStack]);
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack.get();
  fiber->context.uc_stack.ss_size = Machine::kStack;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, &Enter, 0);
  fiber->done = fiber->waits = false;
}

// Runs every thread of the warp up to its next shuffle, or to its end. Returns whether any thread shuffles.
inline bool RunToShuffle(unsigned first_thread, std::mt19937* random) {
  std::array<int, kWarp> order;
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), *random);
  int waiting = 0;
  for (const int lane : order) {
    Fiber& fiber = machine.fibers[static_cast<std::size_t>(lane)];
    if (fiber.done) continue;
    machine.current = lane;
    threadIdx.x = first_thread + static_cast<unsigned>(lane);
    swapcontext(&machine.main, &fiber.context);
    if (!machine.error.empty()) return false;
    waiting += fiber.waits;
  }
  if (waiting != 0 && waiting != kWarp)
    machine.error = std::to_string(waiting) + " of a warp's threads make a shuffle";
  return waiting != 0 && machine.error.empty();
}

// Returns what is wrong, if anything. Threads of a block: a multiple of a warp's.
inline std::string Launch(unsigned blocks, unsigned threads, unsigned seed, std::function<void()> body) {
  std::mt19937 random(seed);
  gridDim.x = blocks, blockDim.x = threads;
  machine.body = std::move(body);
  machine.accesses.clear();
  machine.error.clear();
  std::vector<unsigned> warps(blocks * (threads / kWarp));
  std::iota(warps.begin(), warps.end(), 0u);
  std::shuffle(warps.begin(), warps.end(), random);
  for (const unsigned warp : warps) {
    blockIdx.x = warp / (threads / kWarp);
    for (Fiber& fiber : machine.fibers) Start(&fiber);
    while (RunToShuffle(warp % (threads / kWarp) * kWarp, &random)) {
      for (Fiber& fiber : machine.fibers)
        fiber.got = machine.fibers[static_cast<std::size_t>(fiber.from)].sent;
      for (Fiber& fiber : machine.fibers) fiber.waits = false;
    }
    if (!machine.error.empty()) break;
  }
  return machine.error;
}

}  // namespace tierstore::cuda::emulator
