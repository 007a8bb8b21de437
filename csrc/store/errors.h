// Declares the row store's errors besides IoError. The bindings turn each of them into its class of
// tierstore/errors.py.
#pragma once

#include <stdexcept>

namespace tierstore {

// Bytes are damaged. The message names file, offset and, where known, table and id.
class CorruptError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The byte cap cannot be kept. Nothing is lost; reads and commits go on.
class FullError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A call came after Close.
class ClosedError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The store cannot take an argument. Nothing was changed.
class InputError : public std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

}  // namespace tierstore
