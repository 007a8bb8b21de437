// ReadOnlyEnv is an Env around another Env that changes nothing: calls that would remove or truncate return
// and do nothing, and calls that would write throw EROFS. So a store can be opened at a commit and read where
// writing is not allowed.
#pragma once

#include "io/env.h"

namespace tierstore {

class ReadOnlyEnv final : public Env {
 public:
  // `base` must live longer.
  explicit ReadOnlyEnv(Env& base) : base_(base) {}

  std::unique_ptr<File> Open(const std::string& path, OpenMode mode, bool direct) override;
  bool Exists(const std::string& path) override { return base_.Exists(path); }
  std::vector<std::string> List(const std::string& directory) override { return base_.List(directory); }
  void Rename(const std::string& from, const std::string& to) override;
  void Remove(const std::string&) override {}
  void SyncDirectory(const std::string&) override {}
  std::unique_ptr<BatchReader> NewBatchReader(ReadEngine engine, unsigned queue_depth,
                                              unsigned devices) override {
    return base_.NewBatchReader(engine, queue_depth, devices);
  }
  unsigned Devices() const override { return base_.Devices(); }
  std::uint64_t FreeBytes(const std::string& directory) override { return base_.FreeBytes(directory); }

 private:
  Env& base_;
};

}  // namespace tierstore
