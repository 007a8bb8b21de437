// Declares the parts of the posix Env that its files and readers share.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "common/fork.h"
#include "io/env.h"

namespace tierstore {

// Names are looked up in a Folder. The directory stays open, so that neither a new working directory nor a
// lack of descriptors separates a store from its files. Descriptor -1 stands for the process's working
// directory.
struct Folder {
  std::string path;
  OwnDescriptor descriptor;

  // Returns the name of `path` in the folder, or `path` where the path is not in the folder. `at` gets the
  // descriptor that calls such as openat take with the name.
  const char* Resolve(const std::string& path, int* at) const;
};

// A PosixFile opens its descriptor when a call needs the descriptor, and calls share the descriptor. All
// files of the process together hold so few descriptors that the process has enough left (OpenFiles).
class PosixFile final : public File {
 public:
  using Descriptor = std::shared_ptr<const OwnDescriptor>;

  PosixFile(std::shared_ptr<const Folder> folder, const std::string& path, OpenMode mode, bool direct);
  ~PosixFile() override;
  PosixFile(const PosixFile&) = delete;
  PosixFile& operator=(const PosixFile&) = delete;

  std::size_t Read(std::uint64_t offset, void* data, std::size_t size) override;
  void Write(std::uint64_t offset, const void* data, std::size_t size) override;
  void Sync() override;
  void Truncate(std::uint64_t size) override;
  std::uint64_t Size() override;
  bool IsDirect() const override { return direct_; }
  const std::string& path() const override { return path_; }
  std::shared_ptr<const void> Hold(bool may_wait) override { return Use(may_wait); }

  // Opens the file, which stays open while the result lives. Throws IoError, with IsOutOfDescriptors() when
  // no descriptor is free. Returns nullptr if `may_wait` and all descriptors of the files are in use: ask
  // again when a file has released one.
  Descriptor Use(bool may_wait = false);
  // Call it after a transfer was refused with EINVAL: from now on the file goes through the page cache, which
  // takes any alignment. Returns false if the file did so before.
  bool GiveUpDirect(const Descriptor& descriptor);

 private:
  friend class OpenFiles;

  Descriptor Open(int extra_flags);
  int OpenOnce(int flags) const;
  void SyncBeforeClosing(const Descriptor& descriptor);

  const std::shared_ptr<const Folder> folder_;
  const std::string path_;
  const int flags_;  // without flags that create
  const bool opened_direct_;
  std::atomic<bool> direct_;
  std::atomic<bool> unsynced_{false};
  dev_t device_ = 0;
  ino_t inode_ = 0;
  const unsigned fork_count_ = ForkCount();

  std::mutex syncing_;   // held during every sync
  int failed_sync_ = 0;  // errno of a sync before the descriptor was closed

  // Guarded by OpenFiles' mutex.
  Descriptor open_;
  bool pinned_ = false;  // the file has lost its name, so it cannot be opened again
  std::list<PosixFile*>::iterator place_, used_place_;
};

// OpenFiles holds the descriptors of all PosixFiles of the process. When they are more than a quarter of the
// process's limit, the least recently used descriptors are closed. Thread-safe.
class OpenFiles {
 public:
  static OpenFiles& Instance();

  // Opens a new file.
  void Add(PosixFile& file, int extra_flags);
  void Remove(PosixFile& file);
  PosixFile::Descriptor Use(PosixFile& file, bool may_wait);
  // Keeps files of this path open from now on, as long as they live: the name is about to go.
  void Pin(const std::string& path);
  // Closes descriptors that no caller uses.
  void CloseIdle();

 private:
  using Lock = std::unique_lock<std::mutex>;

  PosixFile::Descriptor Open(PosixFile& file, int extra_flags);
  void Shrink(Lock& lock, std::size_t most);
  PosixFile* PickIdle(bool unsynced, std::unique_lock<std::mutex>* syncing);

  std::mutex mutex_;
  std::list<PosixFile*> files_;  // all that live
  std::list<PosixFile*> used_;   // all open files, the least recently used first
};

// Returns a reader of PosixFiles, or nullptr where the kernel refuses io_uring, with its errno in `error`.
std::unique_ptr<BatchReader> NewUringReader(unsigned queue_depth, unsigned devices, int* error);

}  // namespace tierstore
