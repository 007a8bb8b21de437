// MemoryEnv is a file system in memory that remembers every operation, so that a test can ask for each state
// in which a crash could have left the disk.
//
// A crash may lose a write or truncation that no later Sync of its file covers, and may tear such a write at
// 512-byte sectors. A crash may lose a creation, rename or removal that no later SyncDirectory of its
// directory covers. Each operation may be lost alone. These promises are weaker than the promises of
// journaling file systems, and the store relies on no other promises.
#pragma once

#include <map>
#include <mutex>
#include <random>

#include "io/env.h"

namespace tierstore {

class MemoryEnv final : public Env {
 public:
  std::unique_ptr<File> Open(const std::string& path, OpenMode mode, bool direct) override;
  bool Exists(const std::string& path) override;
  std::vector<std::string> List(const std::string& directory) override;
  void Rename(const std::string& from, const std::string& to) override;
  void Remove(const std::string& path) override;
  void SyncDirectory(const std::string& directory) override;
  std::unique_ptr<BatchReader> NewBatchReader(ReadEngine, unsigned, unsigned) override {
    return NewSerialReader();
  }

  // Returns the number of operations so far.
  std::size_t operations();

  enum class Unsynced { kLost, kKept, kRandom };
  // Returns the disk after a crash that came after the first `operations` operations. `seed` chooses for
  // kRandom. Operations in the directory `keeps` are kept in any case, as if the cache of the directory's
  // device had a battery.
  std::unique_ptr<MemoryEnv> AfterCrash(std::size_t operations, Unsynced unsynced, std::uint64_t seed,
                                        const std::string& keeps = "");

  // Get and set the whole contents of a file, for tests that damage files. These calls are not recorded.
  std::vector<std::byte> Contents(const std::string& path);
  void SetContents(const std::string& path, std::vector<std::byte> contents);

 private:
  friend class MemoryFile;

  struct Inode {
    std::size_t id = 0;
    std::vector<std::byte> data;
  };
  enum class Kind { kCreate, kWrite, kTruncate, kSync, kRename, kRemove, kSyncDirectory };
  struct Operation {
    Kind kind;
    std::size_t inode = 0;
    std::uint64_t offset = 0;  // or size
    std::vector<std::byte> data = {};
    std::string from = {}, to = {};  // paths; `to` also of a file that is written, and of a directory
  };
  using Disk = std::pair<std::map<std::size_t, std::shared_ptr<Inode>>, std::map<std::string, std::size_t>>;

  static void Apply(const Operation& operation, Disk& disk);
  static void ApplyTorn(const Operation& operation, Disk& disk, std::mt19937_64& random);
  std::vector<bool> Durable(std::size_t operations) const;

  std::mutex mutex_;  // guards all that follows
  std::map<std::string, std::shared_ptr<Inode>> names_;
  std::size_t next_inode_ = 1;
  std::vector<Operation> log_;
  Disk before_log_;  // what a crash image began with
};

}  // namespace tierstore
