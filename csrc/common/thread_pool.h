// Runs loops over independent outputs on the core's only thread pool.
//
// The calling thread takes part in its own loop, so a loop never waits for a free worker, loops may run
// at the same time from several threads, and a loop may start another one. The pool starts its threads on
// first use and again, lazily, in a forked child; a thread has the niceness of the thread that started it.
//
// A loop that is over soon costs its caller little, however many threads there are: the caller wakes one
// thread at most, and threads that come to help wake others. Where there are many CPUs, some threads spin for
// a moment after a loop, so that the next one finds them awake.
#pragma once

#include <cstdint>
#include <functional>

namespace tierstore {

// Calls fn(b, e) for consecutive pieces [b, e) of [begin, end), each `grain` long except the last, and
// returns when all pieces are done. All threads work in the caller's floating-point mode. Pieces run in any
// order on any thread; grain must be positive. If fn throws, pieces that have not begun are dropped, and the
// first exception is rethrown here.
void ParallelFor(std::int64_t begin, std::int64_t end, std::int64_t grain,
                 const std::function<void(std::int64_t, std::int64_t)>& fn);

// Returns the number of threads that one loop of the calling thread may use, that thread included. The
// default is the number of CPUs that this process may run on, at most 16.
int NumThreads();
// Sets the number for loops that start afterwards. Throws std::invalid_argument unless 1 <= n <= 1024.
void SetNumThreads(int n);
// Lets the calling thread's loops use at most n threads, whatever SetNumThreads says; 0 ends the limit.
// Throws std::invalid_argument for n < 0.
void LimitThreads(int n);

// Starts the threads that loops may use now, so that they have the caller's niceness.
void StartThreads();

// Returns how many threads of the pool may spin at a time in a process that may run on so many CPUs. At least
// half of the CPUs are left to other threads, and few CPUs are all left to them.
int SpinningThreads(int cpus);
// Sets that number, in place of the one for this process's CPUs. Only tests and measurements need this.
void SetSpinningThreads(int n);

}  // namespace tierstore
