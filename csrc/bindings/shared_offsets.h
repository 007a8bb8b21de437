// Shares the offsets of bags that have one id each: 0, 1, 2 .. are the same in every batch. Without one array
// for all batches, a window of many batches would keep as many copies.
#pragma once

#include <cstdint>

#include "bindings/arrays.h"

namespace tierstore {

// The shared array is kept for ever, so it is no longer than this: 32 MiB.
constexpr pybind11::ssize_t kMostShared = 1 << 22;

// Returns the first `n` numbers from 0 on, where n is at most kMostShared. Python cannot write to the array.
// Call it with the interpreter's lock.
Array<std::int64_t> SharedOffsets(pybind11::ssize_t n);
bool AreShared(const pybind11::array& offsets);

}  // namespace tierstore
