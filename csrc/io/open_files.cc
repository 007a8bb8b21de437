// Chooses which files of the process are open.
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "io/errors.h"
#include "io/posix_env.h"

namespace tierstore {
namespace {

constexpr rlim_t kFewest = 8, kMost = 512;

// The limit is asked for each time, since the user may change the limit.
std::size_t MostOpen() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kFewest;
  return std::clamp(limit.rlim_cur / 4, kFewest, kMost);
}

std::atomic<OpenFiles*> g_files{nullptr};

}  // namespace

// The instance is never destroyed, since files may be closed while the process ends. A forked child, where
// the mutex may be locked, forgets the instance and makes an instance of its own.
OpenFiles& OpenFiles::Instance() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { g_files.store(nullptr); });
  static_cast<void>(registered);
  OpenFiles* files = g_files.load();
  if (files != nullptr) return *files;
  auto* const fresh = new OpenFiles;
  if (g_files.compare_exchange_strong(files, fresh)) return *fresh;
  delete fresh;
  return *files;
}

// Opens the file. When descriptors are short, closes idle descriptors and tries once more.
PosixFile::Descriptor OpenFiles::Open(PosixFile& file, int extra_flags) {
  try {
    return file.Open(extra_flags);
  } catch (const IoError& error) {
    if (!error.IsOutOfDescriptors()) throw;
  }
  CloseIdle();
  return file.Open(extra_flags);
}

void OpenFiles::Add(PosixFile& file, int extra_flags) {
  PosixFile::Descriptor opened = Open(file, extra_flags);
  Lock lock(mutex_);
  file.place_ = files_.insert(files_.end(), &file);
  file.open_ = std::move(opened);
  file.used_place_ = used_.insert(used_.end(), &file);
  Shrink(lock, MostOpen());
}

void OpenFiles::Remove(PosixFile& file) {
  const Lock lock(mutex_);
  files_.erase(file.place_);
  if (file.open_ != nullptr) used_.erase(file.used_place_);
  file.open_.reset();
}

PosixFile::Descriptor OpenFiles::Use(PosixFile& file, bool may_wait) {
  Lock lock(mutex_);
  if (file.open_ != nullptr) {
    used_.splice(used_.end(), used_, file.used_place_);
    return file.open_;
  }
  if (may_wait && used_.size() >= MostOpen()) {
    std::unique_lock<std::mutex> syncing;
    if (PickIdle(false, nullptr) == nullptr && PickIdle(true, &syncing) == nullptr) return nullptr;
  }
  lock.unlock();
  PosixFile::Descriptor opened = Open(file, 0);
  lock.lock();
  if (file.open_ == nullptr) {  // no other thread was faster
    file.open_ = std::move(opened);
    file.used_place_ = used_.insert(used_.end(), &file);
  }
  PosixFile::Descriptor result = file.open_;
  Shrink(lock, MostOpen());
  return result;
}

void OpenFiles::Pin(const std::string& path) {
  for (bool retried = false;;) {
    Lock lock(mutex_);
    const auto found = std::find_if(files_.begin(), files_.end(), [&](const PosixFile* file) {
      return !file->pinned_ && file->path() == path;
    });
    if (found == files_.end()) return;
    PosixFile& file = **found;
    if (file.open_ == nullptr) {
      try {
        file.open_ = file.Open(0);  // with the mutex, so that the file outlives this
      } catch (const IoError& error) {
        if (!error.IsOutOfDescriptors() || std::exchange(retried, true)) throw;
        Shrink(lock, 0);
        continue;
      }
      file.used_place_ = used_.insert(used_.end(), &file);
    }
    file.pinned_ = true;
  }
}

void OpenFiles::CloseIdle() {
  Lock lock(mutex_);
  Shrink(lock, 0);
}

// Returns the least recently used file that is not in use. If the file is not synced, `syncing` gets its
// lock.
PosixFile* OpenFiles::PickIdle(bool unsynced, std::unique_lock<std::mutex>* syncing) {
  const auto found = std::find_if(used_.begin(), used_.end(), [&](PosixFile* file) {
    if (file->open_.use_count() > 1 || file->pinned_ || file->unsynced_ != unsynced) return false;
    if (!unsynced) return true;
    *syncing = std::unique_lock(file->syncing_, std::try_to_lock);
    return syncing->owns_lock();
  });
  return found == used_.end() ? nullptr : *found;
}

void OpenFiles::Shrink(Lock& lock, std::size_t most) {
  while (used_.size() > most) {
    std::unique_lock<std::mutex> syncing;
    PosixFile* file = PickIdle(false, nullptr);
    // The kernel may forget a failed write once the file is closed, so a sync comes first.
    if (file == nullptr) file = PickIdle(true, &syncing);
    if (file == nullptr) return;
    used_.erase(file->used_place_);
    const PosixFile::Descriptor closing = std::exchange(file->open_, nullptr);
    if (!syncing.owns_lock()) continue;
    lock.unlock();
    file->SyncBeforeClosing(closing);
    syncing.unlock();  // from here on the file may be gone
    lock.lock();
  }
}

}  // namespace tierstore
