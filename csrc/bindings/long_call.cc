#include "bindings/long_call.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "bindings/registry.h"
#include "common/call_limit.h"
#include "common/fork.h"
#include "store/errors.h"

namespace py = pybind11;

namespace tierstore {
namespace {

constexpr std::chrono::milliseconds kBetweenSignals{100};
constexpr std::chrono::milliseconds kShort{200};

bool OnMainThread() { return syscall(SYS_gettid) == getpid(); }

// The caller and the thread that runs the call share a Running. A child that a handler forks leaves it in
// memory.
struct Running {
  CallLimit limit;
  std::mutex mutex;
  std::condition_variable changed;
  bool ended = false;
  std::exception_ptr error;
};

void RunInThread(const std::function<void()>& call, const std::shared_ptr<Running>& running) {
  std::thread([&call, running] {
    std::exception_ptr error;
    try {
      const LimitedScope scope(running->limit);
      call();
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(running->mutex);
    running->error = std::move(error);
    running->ended = true;
    running->changed.notify_all();
  }).detach();
}

// Waits until the call has ended, and returns the first exception that a handler raised meanwhile. Call it
// with the GIL released.
std::exception_ptr AwaitWithSignals(Running& running) {
  const unsigned forks = ForkCount();
  std::exception_ptr raised;
  std::unique_lock lock(running.mutex);
  while (!running.changed.wait_for(lock, kBetweenSignals, [&] { return running.ended; })) {
    lock.unlock();
    {
      const py::gil_scoped_acquire acquire;
      if (PyErr_CheckSignals() != 0) {
        const auto latest = std::make_exception_ptr(py::error_already_set());
        if (raised == nullptr) raised = latest;
        running.limit.End();
      }
    }
    if (forks != ForkCount()) {
      throw ClosedError(
          "this process was forked during a call of the store; the call goes on in the parent process");
    }
    lock.lock();
  }
  return raised;
}

}  // namespace

void RunLong(const std::function<void()>& call) {
  const auto running = std::make_shared<Running>();
  std::exception_ptr raised;
  {
    const py::gil_scoped_release release;
    bool started = OnMainThread();
    if (started) {
      try {
        RunInThread(call, running);
      } catch (const std::system_error&) {
        started = false;  // without another thread, signals wait until the call has ended
      }
    }
    if (!started) {
      call();
      return;
    }
    raised = AwaitWithSignals(*running);
  }
  if (raised != nullptr) std::rethrow_exception(raised);
  if (running->error != nullptr) std::rethrow_exception(running->error);
}

void RunShort(const std::function<void()>& call) {
  {
    const py::gil_scoped_release release;
    if (!OnMainThread()) {
      call();
      return;
    }
    const CallLimit limit(kShort);
    const LimitedScope scope(limit);
    try {
      call();
      return;
    } catch (const CallEnded&) {
    }
  }
  RunLong(call);
}

}  // namespace tierstore
