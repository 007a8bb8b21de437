// Parts of the posix Env that its readers share.
#pragma once

#include <memory>
#include <string>

#include "io/env.h"

namespace tierstore {

class PosixFile final : public File {
 public:
  PosixFile(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}
  ~PosixFile() override;
  PosixFile(const PosixFile&) = delete;
  PosixFile& operator=(const PosixFile&) = delete;

  std::size_t Read(std::uint64_t offset, void* data, std::size_t size) override;
  void Write(std::uint64_t offset, const void* data, std::size_t size) override;
  void Sync() override;
  void Truncate(std::uint64_t size) override;
  std::uint64_t Size() override;
  const std::string& path() const override { return path_; }

  int descriptor() const { return descriptor_; }

 private:
  const int descriptor_;
  const std::string path_;
};

// nullptr where the kernel refuses io_uring.
std::unique_ptr<BatchReader> NewUringReader(unsigned queue_depth);
std::unique_ptr<BatchReader> NewPreadReader(unsigned threads);

}  // namespace tierstore
