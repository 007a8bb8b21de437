// StripedEnv is an Env that spreads the segments of a store over several devices, and keeps all other files
// on the first device.
//
// To the store its folders are one directory, the first folder. A segment NNNNNNNN.seg has a part of the same
// name in each folder that it was striped over (store/striped_file.h); a segment from a time when the store
// had one folder is a whole file in one of them. All of a segment's parts exist, and their names are durable,
// before a commit names the segment. A crash that interrupts the creation or removal of a segment may leave
// any of its parts; List tells of such parts, so that the store removes them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/env.h"
#include "store/segment.h"
#include "store/striped_file.h"

namespace tierstore {

// A folder of a store, and the Env that reaches the folder's device. The Env must live longer than the store.
struct StripeFolder {
  Env* env;
  std::string path;
};

class StripedEnv final : public Env {
 public:
  static constexpr std::size_t kMostFolders = 16;

  // `stripe_bytes` is a multiple of all frames, and of Chunk::kBytes for speed. Throws InputError.
  explicit StripedEnv(std::vector<StripeFolder> folders, std::uint32_t stripe_bytes = Chunk::kBytes);

  // Throws CorruptError when a part is missing, or is of another file.
  std::unique_ptr<File> Open(const std::string& path, OpenMode mode, bool direct) override;
  // Leaves out devices that have no room for their part, unless no device has room. Segments begin on the
  // devices in turn.
  std::unique_ptr<File> Create(const std::string& path, bool direct, std::uint64_t bytes) override;
  bool Exists(const std::string& path) override;
  std::vector<std::string> List(const std::string& directory) override;
  void Rename(const std::string& from, const std::string& to) override;
  void Remove(const std::string& path) override;
  // For the first folder, syncs all folders in which names have changed, at once.
  void SyncDirectory(const std::string& directory) override;
  std::unique_ptr<BatchReader> NewBatchReader(ReadEngine engine, unsigned queue_depth,
                                              unsigned devices) override;
  unsigned Devices() const override { return static_cast<unsigned>(folders_.size()); }
  void Close() override;

 private:
  bool IsStriped(const std::string& path) const;
  std::string PathIn(std::size_t folder, const std::string& path) const;
  std::vector<unsigned> ChooseDevices(std::uint64_t share);
  Env& first() const { return *folders_[0].env; }

  const std::vector<StripeFolder> folders_;
  const std::uint32_t stripe_bytes_;
  std::vector<std::atomic<bool>> changed_;            // by folder: names, since the last sync
  std::vector<std::atomic<std::uint64_t>> promised_;  // by folder: bytes that open segments will take
  std::atomic<std::uint32_t> turn_{0};
};

}  // namespace tierstore
