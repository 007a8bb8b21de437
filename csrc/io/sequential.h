// Reads and writes whole files front to back through block-aligned buffers, so that direct IO works.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>

#include "io/aligned_buffer.h"
#include "io/env.h"

namespace tierstore {

class SequentialWriter {
 public:
  static constexpr std::size_t kBufferBytes = 1 << 20;

  explicit SequentialWriter(File& file) : file_(file), buffer_(kBufferBytes) {}

  void Append(const void* data, std::size_t size) {
    const auto* bytes = static_cast<const std::byte*>(data);
    while (size > 0) {
      const std::size_t n = std::min(size, buffer_.size() - used_);
      std::memcpy(buffer_.data() + used_, bytes, n);
      used_ += n;
      bytes += n;
      size -= n;
      if (used_ == buffer_.size()) WriteOut();
    }
  }

  // Pads with zeros to a block boundary and returns the size of the file. Does not sync.
  std::uint64_t Finish() {
    const std::size_t end = (used_ + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    std::memset(buffer_.data() + used_, 0, end - used_);
    used_ = end;
    WriteOut();
    return offset_;
  }

 private:
  void WriteOut() {
    if (used_ > 0) file_.Write(offset_, buffer_.data(), used_);
    offset_ += used_;
    used_ = 0;
  }

  File& file_;
  AlignedBuffer buffer_;
  std::size_t used_ = 0;
  std::uint64_t offset_ = 0;
};

class SequentialReader {
 public:
  explicit SequentialReader(File& file) : file_(file), buffer_(SequentialWriter::kBufferBytes) {}

  // Copies the next bytes. Returns false when the file ends within them.
  bool Read(void* out, std::size_t size) {
    auto* bytes = static_cast<std::byte*>(out);
    while (size > 0) {
      if (at_ == end_) {
        end_ = file_.Read(offset_, buffer_.data(), buffer_.size());
        offset_ += end_;
        at_ = 0;
        if (end_ == 0) return false;
      }
      const std::size_t n = std::min(size, end_ - at_);
      std::memcpy(bytes, buffer_.data() + at_, n);
      at_ += n;
      bytes += n;
      size -= n;
    }
    return true;
  }

 private:
  File& file_;
  AlignedBuffer buffer_;
  std::size_t at_ = 0, end_ = 0;
  std::uint64_t offset_ = 0;
};

}  // namespace tierstore
