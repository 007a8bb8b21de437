// IoError is a failure of the operating system, or of an Env that imitates one, with its errno.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace tierstore {

class IoError : public std::runtime_error {
 public:
  // `what` names the attempt, as in "write 4096 bytes at offset 0".
  IoError(int code, const std::string& path, const std::string& what)
      : std::runtime_error(path + ": " + what + ": " + std::strerror(code)), code_(code) {}

  int code() const { return code_; }
  // Returns whether the device or the quota has no room, or the file has the largest size allowed.
  bool IsFull() const { return code_ == ENOSPC || code_ == EDQUOT || code_ == EFBIG; }
  // Returns whether the process or the system is out of descriptors: nothing was tried yet, and a later call
  // may work.
  bool IsOutOfDescriptors() const { return code_ == EMFILE || code_ == ENFILE; }

 private:
  int code_;
};

}  // namespace tierstore
