// Parts of the posix Env that its readers share.
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

// Where names are looked up: a directory that stays open, so that neither a new working directory nor a lack
// of descriptors comes between a store and its files; or, with descriptor -1, the process's own view.
struct Folder {
  std::string path;
  OwnDescriptor descriptor;

  // The name of `path` in the folder, or `path` where it is not in the folder; `at` is for openat and others.
  const char* Resolve(const std::string& path, int* at) const;
};

// A file whose descriptor is opened when needed and shared for as long as somebody uses it. All files of the
// process together keep so few open that the process has enough left (OpenFiles).
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

  // Stays open while the result lives. Throws IoError; IsOutOfDescriptors() when there is none to be had.
  // nullptr if `may_wait` and all that the files may have are in use: ask again when some have been given
  // back.
  Descriptor Use(bool may_wait = false);
  // After a transfer was refused with EINVAL: from now on the file goes through the page cache, which takes
  // any alignment. False where it did from the start.
  bool GiveUpDirect(const Descriptor& descriptor);

 private:
  friend class OpenFiles;

  Descriptor Open(int extra_flags);
  int OpenOnce(int flags) const;
  void SyncBeforeClosing(const Descriptor& descriptor);

  const std::shared_ptr<const Folder> folder_;
  const std::string path_;
  const int flags_;  // without those that create
  const bool opened_direct_;
  std::atomic<bool> direct_;
  std::atomic<bool> unsynced_{false};
  dev_t device_ = 0;
  ino_t inode_ = 0;
  const unsigned fork_count_ = ForkCount();

  std::mutex syncing_;   // held during every sync
  int failed_sync_ = 0;  // errno of one that came before the descriptor was closed

  // Guarded by OpenFiles' mutex.
  Descriptor open_;
  bool pinned_ = false;  // has lost its name, so it cannot be opened again
  std::list<PosixFile*>::iterator place_, used_place_;
};

// The descriptors of all PosixFiles of the process: those that were not used for longest are closed when
// there are more than a quarter of what the process may have. Thread-safe.
class OpenFiles {
 public:
  static OpenFiles& Instance();

  // Opens a new file.
  void Add(PosixFile& file, int extra_flags);
  void Remove(PosixFile& file);
  PosixFile::Descriptor Use(PosixFile& file, bool may_wait);
  // Files of this path stay open from now on, as long as they live: the name is about to go.
  void Pin(const std::string& path);
  // Closes descriptors that nobody uses.
  void CloseIdle();

 private:
  using Lock = std::unique_lock<std::mutex>;

  PosixFile::Descriptor Open(PosixFile& file, int extra_flags);
  void Shrink(Lock& lock, std::size_t most);
  PosixFile* PickIdle(bool unsynced, std::unique_lock<std::mutex>* syncing);

  std::mutex mutex_;
  std::list<PosixFile*> files_;  // that live
  std::list<PosixFile*> used_;   // that are open, the one not used for longest first
};

// nullptr where the kernel refuses io_uring, with its errno.
std::unique_ptr<BatchReader> NewUringReader(unsigned queue_depth, int* error);
std::unique_ptr<BatchReader> NewPreadReader(unsigned threads);

}  // namespace tierstore
