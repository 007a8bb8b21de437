#include "common/fork_generation.h"

#include <pthread.h>

#include <atomic>

namespace tierstore {
namespace {
std::atomic<std::uint32_t> g_generation{0};
}  // namespace

std::uint32_t ForkGeneration() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++g_generation; });
  static_cast<void>(registered);
  return g_generation.load(std::memory_order_relaxed);
}

}  // namespace tierstore
