// Makes calls at once that wait for different devices.
#pragma once

#include <cstddef>
#include <future>
#include <vector>

namespace tierstore {

// Calls `call` with each number below `count`, all at once, the first on this thread. Returns when all have
// ended; throws the first error in the order of the numbers.
template <typename Call>
void AllAtOnce(std::size_t count, const Call& call) {
  std::vector<std::future<void>> others;  // their destructors wait
  for (std::size_t i = 1; i < count; ++i) others.push_back(std::async(std::launch::async, call, i));
  if (count > 0) call(0);
  for (auto& other : others) other.get();
}

}  // namespace tierstore
