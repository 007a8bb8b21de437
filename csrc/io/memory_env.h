// A file system in memory that remembers every operation, so that a test can ask for each state in which a
// crash could have left the disk.
//
// What a crash may do: a write or truncation that no later Sync of its file covers may be lost, or, a write,
// be torn at 512-byte sectors; a creation, rename or removal that no later SyncDirectory of its directory
// covers may be lost, each for itself. That is weaker than what journaling file systems promise, and all that
// the store relies on.
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

  // Operations so far.
  std::size_t operations();

  enum class Unsynced { kLost, kKept, kRandom };
  // The disk after a crash that came after the first `operations` operations. `seed` chooses for kRandom.
  // What was done in the directory `keeps` is kept in any case: the cache of its device has a battery.
  std::unique_ptr<MemoryEnv> AfterCrash(std::size_t operations, Unsynced unsynced, std::uint64_t seed,
                                        const std::string& keeps = "");

  // The whole contents of a file, for tests that damage files. These calls are not recorded.
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
