// Runs device code on the CPU: one fiber for each thread of a warp, which meet at shuffles. Between two
// shuffles the threads of a warp run one after the other, in a random order; so do warps and blocks.
//
// Reported as errors: a shuffle that not all threads of a warp make; an access outside of the arrays of the
// launch, to a read-only one, or not aligned; two threads that access the same memory when one of them
// writes. No kernel here shares memory between threads, so no order of theirs makes the latter right.
#pragma once

#include <setjmp.h>
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

// The accesses of a launch by word, in order of first accesses.
class AccessTable {
 public:
  struct Entry {
    std::uintptr_t word;
    Accesses seen;
  };

  Accesses& operator[](std::uintptr_t word) {
    if (2 * entries_.size() >= places_.size()) Grow();
    std::size_t place = First(word);
    for (; places_[place] != 0; place = (place + 1) & (places_.size() - 1))
      if (Entry& entry = entries_[places_[place] - 1]; entry.word == word) return entry.seen;
    entries_.push_back({word, {}});
    places_[place] = static_cast<std::uint32_t>(entries_.size());
    return entries_.back().seen;
  }
  // Takes no longer than the accesses since the last call did.
  void clear() {
    if (places_.size() > 16 * entries_.size()) places_ = std::vector<std::uint32_t>(kFewest);
    std::fill(places_.begin(), places_.end(), 0);
    entries_.clear();
  }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

 private:
  static constexpr std::size_t kFewest = 1024;

  // Words of 64 bytes are neighbours.
  std::size_t First(std::uintptr_t word) const {
    const std::uint64_t spread = (word / 64) * 0x9e3779b97f4a7c15;
    return ((spread >> 28) + word / 4 % 16) & (places_.size() - 1);
  }
  void Grow() {
    places_.assign(2 * places_.size(), 0);
    for (std::uint32_t i = 0; i < entries_.size(); ++i) {
      std::size_t place = First(entries_[i].word);
      while (places_[place] != 0) place = (place + 1) & (places_.size() - 1);
      places_[place] = i + 1;
    }
  }

  std::vector<Entry> entries_;
  std::vector<std::uint32_t> places_ = std::vector<std::uint32_t>(kFewest);  // 0: free
};

// A thread of the warp that runs. Its stack stays from warp to warp, as does its loop over their bodies.
struct Fiber {
  jmp_buf state;
  std::unique_ptr<char[]> stack;
  bool done = false, waits = false;
  bool in_body = true;  // it was never started, or has failed
  std::uint64_t sent, got;
  int from;
};

struct Machine {
  static constexpr std::size_t kStack = std::size_t{128} << 10;
  std::vector<Array> arrays;  // by address
  bool is_pageable = false;   // memory outside of the arrays may be accessed, and is not checked
  AccessTable accesses;
  std::array<Fiber, kWarp> fibers;
  jmp_buf main;
  int current = 0;
  std::function<void()> body;
  std::string error;  // the first one; its kernel does not go on
};
inline Machine machine;

// Goes on where ``to`` was left. Unlike swapcontext it makes no system calls.
[[gnu::noinline]] inline void Switch(jmp_buf from, jmp_buf to) {
  if (_setjmp(from) == 0) _longjmp(to, 1);
}

inline Fiber& Current() { return machine.fibers[static_cast<std::size_t>(machine.current)]; }

// Threads that fail do not go on.
inline void Fail(const std::string& what) {
  if (machine.error.empty())
    machine.error =
        what + " (block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(threadIdx.x) + ")";
  Switch(Current().state, machine.main);
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
  const auto where = [&] { return array->name + " at byte " + std::to_string(at - array->begin); };
  if (write && !array->writable) return Fail("writes to the read-only " + where());
  if (at % alignment != 0)
    return Fail(verb + where() + ", which is not aligned to " + std::to_string(alignment));
  const std::int64_t me = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::size_t unit = bytes % 4 == 0 ? 4 : bytes;  // a byte by itself counts as the half that it begins
  const std::size_t first = bytes == 2 ? at / 2 % 2 : 0, last = bytes % 4 == 0 ? 1 : first;
  for (std::size_t i = 0; i < bytes; i += unit) {
    Accesses& seen = machine.accesses[bytes == 2 ? at - 2 * first : at + i];
    const auto other = [me](std::int64_t thread) { return thread != Accesses::kNone && thread != me; };
    for (std::size_t half = first; half <= last; ++half) {
      if (other(seen.writer[half]) || (write && other(seen.reader[half])))
        return Fail(verb + where() + ", which another thread " +
                    (other(seen.writer[half]) ? "writes" : "reads"));
      std::int64_t& mine = write ? seen.writer[half] : seen.reader[half];
      mine = mine == Accesses::kNone || mine == me ? me : Accesses::kMany;
    }
  }
}

template <typename T>
T Shuffle(T value, int from) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  Fiber& mine = Current();
  std::memcpy(&mine.sent, &value, sizeof value);
  mine.from = from;
  mine.waits = true;
  Switch(mine.state, machine.main);
  T got;
  std::memcpy(&got, &mine.got, sizeof got);
  return got;
}

// A shuffle by which a thread gets a bit from every thread of the warp.
inline unsigned Ballot(bool here) {
  constexpr int kFromAll = -1;
  return static_cast<unsigned>(Shuffle<std::uint64_t>(here ? 1 : 0, kFromAll));
}

// What a thread gets at a shuffle that all threads have reached.
inline std::uint64_t Got(int from) {
  if (from >= 0) return machine.fibers[static_cast<std::size_t>(from)].sent;
  std::uint64_t bits = 0;
  for (std::size_t lane = 0; lane < kWarp; ++lane) bits |= (machine.fibers[lane].sent & 1) << lane;
  return bits;
}

// Where a fiber begins: the main program goes on, and comes back for the body of every warp.
inline void Enter() {
  Fiber& mine = Current();
  while (true) {
    Switch(mine.state, machine.main);
    machine.body();
    mine.done = true, mine.in_body = false;
  }
}

[[gnu::noinline]] inline void Begin(const ucontext_t& context) {
  if (_setjmp(machine.main) == 0) setcontext(&context);
}

inline void Start(std::size_t lane) {
  Fiber& fiber = machine.fibers[lane];
  if (fiber.in_body) {
    if (!fiber.stack) fiber.stack.reset(new char[Machine::kStack]);
    ucontext_t fresh;
    getcontext(&fresh);
    fresh.uc_stack.ss_sp = fiber.stack.get();
    fresh.uc_stack.ss_size = Machine::kStack;
    fresh.uc_link = nullptr;
    makecontext(&fresh, &Enter, 0);
    machine.current = static_cast<int>(lane);
    Begin(fresh);
  }
  fiber.done = fiber.waits = false;
  fiber.in_body = true;
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
    Switch(machine.main, fiber.state);
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
    for (std::size_t lane = 0; lane < kWarp; ++lane) Start(lane);
    while (RunToShuffle(warp % (threads / kWarp) * kWarp, &random)) {
      for (Fiber& fiber : machine.fibers) fiber.got = Got(fiber.from);
      for (Fiber& fiber : machine.fibers) fiber.waits = false;
    }
    if (!machine.error.empty()) break;
  }
  return machine.error;
}

}  // namespace tierstore::cuda::emulator
