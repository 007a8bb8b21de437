// Gives the interpreter's lock away while a call works on many positions.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>

namespace tierstore {

// A call for fewer positions keeps the lock: getting it back, from a busy thread above all, takes as long as
// the work. Calls of several threads for more positions run side by side.
constexpr std::int64_t kManyPositions = 1 << 9;

class UnlockedIfMany {
 public:
  explicit UnlockedIfMany(std::int64_t positions) {
    if (positions >= kManyPositions) unlocked_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> unlocked_;
};

}  // namespace tierstore
