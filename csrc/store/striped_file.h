// StripedFile is a segment's file whose bytes are spread over several devices: block 0 is in part 0, and the
// stripes behind block 0 go to the parts in turn. docs/reference/formats.md specifies the bytes of a part.
//
// Stripes are as long as the chunks that a store writes at once, and no record crosses the end of a stripe.
// So rows that are written together lie on all devices, and so do rows at neighbouring places.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/env.h"
#include "store/coding.h"

namespace tierstore {

// The first block of a part. Parts of one file differ in `part` alone.
struct PartHeader {
  std::uint32_t parts = 0;
  std::uint32_t part = 0;  // below `parts`
  std::uint32_t stripe_bytes = 0;
  std::uint64_t stamp = 0;  // a random number, drawn for the file

  Bytes Encode() const;  // kBlockBytes
  // Returns nothing for a file that is no part but whole. Throws CorruptError.
  static std::optional<PartHeader> Decode(std::span<const std::byte> in, const std::string& path);
  bool IsOfOneFile(const PartHeader& other) const {
    return parts == other.parts && stripe_bytes == other.stripe_bytes && stamp == other.stamp;
  }
};

// A Promise is the bytes that a part will come to take. They count in a device's sum until they are written.
class Promise {
 public:
  Promise(std::atomic<std::uint64_t>& sum, std::uint64_t bytes) : sum_(sum), left_(bytes) { sum_ += bytes; }
  ~Promise() { sum_ -= left_; }
  Promise(const Promise&) = delete;
  Promise& operator=(const Promise&) = delete;

  void NoteWritten(std::uint64_t bytes) {
    std::uint64_t left = left_;
    while (!left_.compare_exchange_weak(left, left - std::min(left, bytes))) {
    }
    sum_ -= std::min(left, bytes);
  }

 private:
  std::atomic<std::uint64_t>& sum_;
  std::atomic<std::uint64_t> left_;
};

class StripedFile final : public File {
 public:
  struct Part {
    std::unique_ptr<File> file;
    unsigned device;
    std::unique_ptr<Promise> promise = nullptr;  // of a new file
  };
  // A Place says where a byte is: in which part, at which offset, and how many bytes of the stripe are left
  // from there on.
  struct Place {
    std::size_t part;
    std::uint64_t offset, left;
  };

  // `stripe_bytes` is 0 for a file that is whole, in one part without a PartHeader.
  StripedFile(std::string path, std::vector<Part> parts, std::uint32_t stripe_bytes);

  std::size_t Read(std::uint64_t offset, void* data, std::size_t size) override;
  void Write(std::uint64_t offset, const void* data, std::size_t size) override;
  // Syncs the parts that were written to, all at once.
  void Sync() override;
  void Truncate(std::uint64_t size) override;
  // Returns the bytes up to the first that a part lacks.
  std::uint64_t Size() override;
  bool IsDirect() const override;
  const std::string& path() const override { return path_; }
  unsigned DeviceOf(std::uint64_t offset) const override { return parts_[At(offset).part].device; }
  std::uint64_t EndOfStretch(std::uint64_t offset) const override { return offset + At(offset).left; }

  Place At(std::uint64_t offset) const;
  const Part& part(std::size_t number) const { return parts_[number]; }

 private:
  std::uint64_t SizeOfPart(std::size_t part, std::uint64_t size) const;

  const std::string path_;
  const std::vector<Part> parts_;
  const std::uint64_t stripe_bytes_;
  std::vector<std::atomic<bool>> unsynced_;  // by part
};

}  // namespace tierstore
