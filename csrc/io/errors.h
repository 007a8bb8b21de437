// Failures of the operating system (or of an Env that plays one), with their errno.
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
  // No room on the device, in the quota, or in the largest file allowed.
  bool IsFull() const { return code_ == ENOSPC || code_ == EDQUOT || code_ == EFBIG; }
  // The process or the system is out of descriptors: nothing was tried yet, and a later call may work.
  bool IsOutOfDescriptors() const { return code_ == EMFILE || code_ == ENFILE; }

 private:
  int code_;
};

}  // namespace tierstore
