// Loops of many threads at once, nested loops and exceptions, with any number of spinning threads; and loops
// that need every thread of the pool, so that a lost wake-up shows. The argument is the number of rounds.
// Fails by abort.
#include "common/thread_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/float_mode.h"
#include "common/tests/check.h"

using namespace tierstore;

namespace {

using Random = std::mt19937;
using std::chrono::microseconds;

constexpr int kThreadCounts[] = {1, 2, 3, 16};
constexpr int kSpinning[] = {0, 1, 2, 8};

int Below(Random& random, int bound) { return std::uniform_int_distribution(0, bound - 1)(random); }

FloatMode SomeMode(Random& random) {
#if defined(__x86_64__)
  constexpr FloatMode kFlushToZero = 0x8000;
  return DefaultFloatMode() | (Below(random, 2) == 0 ? 0 : kFlushToZero);
#else
  static_cast<void>(random);
  return DefaultFloatMode();
#endif
}

// Waits for up to 200 microseconds: some gaps are shorter than threads spin, and some are longer.
void Rest(Random& random) {
  const int pause = Below(random, 3);
  if (pause == 1) std::this_thread::sleep_for(microseconds(Below(random, 200)));
  if (pause == 2) {
    const auto until = std::chrono::steady_clock::now() + microseconds(Below(random, 100));
    while (std::chrono::steady_clock::now() < until) {
    }
  }
}

// The bounds: no CPU spins where there are few, half of the CPUs do where there are more.
void CheckSpinningThreads() {
  for (const int cpus : {0, 1, 2, 3, 4}) CHECK(SpinningThreads(cpus) == 0);
  CHECK(SpinningThreads(5) == 2 && SpinningThreads(6) == 3 && SpinningThreads(16) == 8);
  for (int cpus = 5; cpus <= 1024; ++cpus)
    CHECK(0 < SpinningThreads(cpus) && 2 * SpinningThreads(cpus) <= cpus);
}

// A loop whose pieces must be run once each, by threads in the caller's mode, or until one throws.
void RunOnce(Random& random, int depth) {
  const int pieces = 1 + Below(random, 64), grain = 1 + Below(random, 3);
  const int length = (pieces - 1) * grain + 1 + Below(random, grain);
  const bool throws = Below(random, 4) == 0, nests = depth < 2 && Below(random, 8) == 0;
  const unsigned seed = random();
  const ScopedFloatMode mode(SomeMode(random));
  const FloatMode expected = CurrentFloatMode();
  std::vector<std::atomic<int>> runs(static_cast<std::size_t>(length));
  std::atomic<int> thrown{0}, running{0};
  bool caught = false;
  try {
    ParallelFor(0, length, grain, [&](std::int64_t begin, std::int64_t end) {
      ++running;
      CHECK(CurrentFloatMode() == expected);
      CHECK(begin % grain == 0 && end == std::min<std::int64_t>(begin + grain, length));
      for (std::int64_t i = begin; i < end; ++i) ++runs[static_cast<std::size_t>(i)];
      Random own(seed + static_cast<unsigned>(begin));
      if (nests) RunOnce(own, depth + 1);
      if (Below(own, 8) == 0) Rest(own);
      const bool fails = throws && Below(own, 16) == 0;
      if (fails) ++thrown;
      --running;
      if (fails) throw std::runtime_error(std::to_string(begin));
    });
  } catch (const std::runtime_error& error) {
    caught = true;
    CHECK(runs[static_cast<std::size_t>(std::atoi(error.what()))] == 1);
  }
  CHECK(running == 0);
  CHECK(caught == (thrown > 0));
  for (const std::atomic<int>& run : runs) CHECK(caught ? run <= 1 : run == 1);
}

void CheckLoopsAtOnce(int threads, int rounds) {
  SetNumThreads(threads);
  std::vector<std::thread> callers;
  for (unsigned caller = 0; caller < 5; ++caller) {
    callers.emplace_back([=] {
      Random random(caller);
      for (int i = 0; i < rounds; ++i) {
        RunOnce(random, 0);
        Rest(random);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// A loop that ends only if a thread of its own runs each piece. A wake-up that got lost shows after a minute.
void Meet(int pieces) {
  std::atomic<int> here{0};
  ParallelFor(0, pieces, 1, [&](std::int64_t, std::int64_t) {
    ++here;
    const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (here < pieces) {
      CHECK(std::chrono::steady_clock::now() < until);
      std::this_thread::sleep_for(microseconds(20));
    }
  });
}

// `callers` loops at once that need all threads of the pool together, short loops beside them, and one loop
// that needs all threads but one.
void CheckNoWakeUpIsLost(int callers, int pieces, int rounds) {
  SetNumThreads(callers * (pieces - 1) + 1);
  std::vector<std::thread> threads;
  for (int caller = 0; caller < callers; ++caller) {
    threads.emplace_back([=] {
      Random random(static_cast<unsigned>(caller));
      for (int i = 0; i < rounds; ++i) {
        Meet(pieces);
        Rest(random);
        if (Below(random, 2) == 0) RunOnce(random, 2);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < rounds; ++i) Meet(NumThreads() - i % 2);
}

// A thread's limit is for its own loops: a loop of two threads uses two, while another thread's uses all.
void CheckLimits(int rounds) {
  SetNumThreads(8);
  LimitThreads(2);
  CHECK(NumThreads() == 2);
  std::thread other([=] {
    CHECK(NumThreads() == 8);
    for (int i = 0; i < rounds; ++i) Meet(8);
  });
  for (int i = 0; i < rounds; ++i) {
    std::atomic<int> running{0};
    ParallelFor(0, 16, 1, [&](std::int64_t, std::int64_t) {
      CHECK(++running <= 2);
      std::this_thread::sleep_for(microseconds(10));
      --running;
    });
  }
  other.join();
  LimitThreads(16);
  CHECK(NumThreads() == 8);
  LimitThreads(1);
  std::atomic<int> elsewhere{0};
  ParallelFor(0, 16, 1, [&, own = std::this_thread::get_id()](std::int64_t, std::int64_t) {
    elsewhere += std::this_thread::get_id() != own;
  });
  CHECK(elsewhere == 0);
  LimitThreads(0);
  CHECK(NumThreads() == 8);
}

// The threads that spin, sleep or work in the parent are not there in the child.
void CheckForkedChild() {
#if !defined(__SANITIZE_THREAD__)  // it refuses threads in forked children
  SetNumThreads(4);
  Meet(4);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    for (int i = 0; i < 5; ++i) Meet(4);
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  Meet(4);
#endif
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  CheckSpinningThreads();
  for (const int spinning : kSpinning) {
    SetSpinningThreads(spinning);
    for (const int threads : kThreadCounts) CheckLoopsAtOnce(threads, rounds);
    for (const int callers : {1, 2, 3, 5}) {
      for (const int pieces : {2, 3, 6}) CheckNoWakeUpIsLost(callers, pieces, rounds);
    }
    CheckLimits(rounds);
    CheckForkedChild();
  }
  std::puts("ok");
}
