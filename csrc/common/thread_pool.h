// The one thread pool of the core, used for loops over independent outputs.
//
// The calling thread takes part in its own loop, so a loop never waits for a free worker, loops may run
// at the same time from several threads, and a loop may start another one. The pool starts its threads on
// first use and again, lazily, in a forked child; a thread has the niceness of the thread that started it.
#pragma once

#include <cstdint>
#include <functional>

namespace tierstore {

// Calls fn(b, e) for consecutive pieces [b, e) of [begin, end), each `grain` long except the last, and
// returns when all are done. All threads work in the caller's floating-point mode. Pieces run in any order on
// any thread; grain must be positive. If fn throws, pieces not yet started are dropped and the first
// exception is rethrown here.
void ParallelFor(std::int64_t begin, std::int64_t end, std::int64_t grain,
                 const std::function<void(std::int64_t, std::int64_t)>& fn);

// Threads that one loop may use, the caller included. Default: the CPUs this process may run on, at most 8.
int NumThreads();
// Takes effect for loops that start afterwards. Throws std::invalid_argument unless 1 <= n <= 1024.
void SetNumThreads(int n);

// Starts the threads that loops may use now, so that they have the caller's niceness.
void StartThreads();

}  // namespace tierstore
