#include "common/fork.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>
#include <set>
#include <vector>

namespace tierstore {
namespace {

std::atomic<unsigned> g_forks{0};

// The registry is never destroyed, since descriptors may be closed while the process ends.
struct Registry {
  std::mutex mutex;  // held across every fork, so that the child finds the set whole
  std::set<int> descriptors;
  std::vector<std::mutex*> others;  // held across every fork, too
};

Registry& TheRegistry() {
  static Registry& registry = *new Registry;
  return registry;
}

void BeforeFork() {
  Registry& registry = TheRegistry();
  registry.mutex.lock();
  for (std::mutex* const other : registry.others) other->lock();
}

void AfterFork() {
  Registry& registry = TheRegistry();
  for (std::mutex* const other : registry.others) other->unlock();
  registry.mutex.unlock();
}

void CloseAllInChild() {
  g_forks.fetch_add(1);
  Registry& registry = TheRegistry();
  for (const int descriptor : registry.descriptors) close(descriptor);
  registry.descriptors.clear();
  AfterFork();
}

// The handlers are registered when the core is loaded, so that no object is older than the handlers.
[[maybe_unused]] const int g_registered = pthread_atfork(BeforeFork, AfterFork, CloseAllInChild);

// Returns a number above the standard streams' for what `descriptor` has open. A process whose streams were
// closed (`2>&-`) gets their numbers for its next files, and would write its messages into the store's.
int AboveStreams(int descriptor) {
  if (descriptor < 0 || descriptor > STDERR_FILENO) return descriptor;
  const int above = fcntl(descriptor, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int error = errno;
  close(descriptor);
  errno = error;
  return above;
}

}  // namespace

unsigned ForkCount() { return g_forks.load(std::memory_order_relaxed); }

void KeepFromChildren(void* begin, std::size_t bytes) { madvise(begin, bytes, MADV_DONTFORK); }

void HoldAcrossForks(std::mutex& mutex) {
  Registry& registry = TheRegistry();
  const std::lock_guard lock(registry.mutex);
  registry.others.push_back(&mutex);
}

OwnDescriptor::OwnDescriptor(const std::function<int()>& open) {
  Registry& registry = TheRegistry();
  const std::lock_guard lock(registry.mutex);
  fork_count_ = ForkCount();
  value_ = AboveStreams(open());
  if (value_ < 0) {
    error_ = errno;
  } else {
    registry.descriptors.insert(value_);
  }
}

void OwnDescriptor::Close() {
  if (value_ < 0) return;
  const int descriptor = std::exchange(value_, -1);
  if (fork_count_ != ForkCount()) return;  // the fork closed it, and another file may have its number by now
  Registry& registry = TheRegistry();
  const std::lock_guard lock(registry.mutex);
  registry.descriptors.erase(descriptor);
  close(descriptor);
}

}  // namespace tierstore
