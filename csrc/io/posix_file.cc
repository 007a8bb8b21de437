// Implements files of the posix Env.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/errors.h"
#include "io/posix_env.h"

namespace tierstore {
namespace {

std::string Range(const char* verb, std::size_t size, std::uint64_t offset) {
  return std::string(verb) + " " + std::to_string(size) + " bytes at offset " + std::to_string(offset);
}

// No file is opened through a link: a store directory from elsewhere must not lead out of itself.
int FlagsOf(OpenMode mode) { return O_CLOEXEC | O_NOFOLLOW | (mode == OpenMode::kRead ? O_RDONLY : O_RDWR); }

}  // namespace

PosixFile::PosixFile(std::shared_ptr<const Folder> folder, const std::string& path, OpenMode mode,
                     bool direct)
    : folder_(std::move(folder)),
      path_(path),
      flags_(FlagsOf(mode)),
      opened_direct_(direct),
      direct_(direct) {
  OpenFiles::Instance().Add(*this, mode == OpenMode::kCreate ? O_CREAT | O_EXCL : 0);
}

PosixFile::~PosixFile() {
  if (fork_count_ != ForkCount()) return;
  OpenFiles::Instance().Remove(*this);
  const std::lock_guard closing(syncing_);  // another thread may sync the descriptor that it closes
}

int PosixFile::OpenOnce(int flags) const {
  int at;
  const char* const name = folder_->Resolve(path_, &at);
  return openat(at, name, flags, 0644);
}

// `extra_flags` are flags that create the file.
PosixFile::Descriptor PosixFile::Open(int extra_flags) {
  const auto attempt = [&] {
    const int flags = flags_ | extra_flags;
    int descriptor = OpenOnce(flags | (direct_ ? O_DIRECT : 0));
    if (descriptor < 0 && direct_ && errno == EINVAL) {
      // Some file systems create the file before they refuse O_DIRECT.
      descriptor = OpenOnce(flags & ~O_EXCL);
      if (descriptor >= 0) direct_ = false;
    }
    return descriptor;
  };
  auto opened = std::make_shared<const OwnDescriptor>(attempt);
  if (opened->error() != 0) {
    throw IoError(opened->error(), path_, (extra_flags & O_CREAT) != 0 ? "create" : "open");
  }
  struct stat status{};
  if (fstat(opened->value(), &status) != 0) throw IoError(errno, path_, "stat");
  if (!S_ISREG(status.st_mode)) throw IoError(EINVAL, path_, "open something that is not a regular file");
  if (inode_ == 0) {
    device_ = status.st_dev;
    inode_ = status.st_ino;
  } else if (status.st_dev != device_ || status.st_ino != inode_) {
    throw IoError(ESTALE, path_, "open the file again: another file has taken its place");
  }
  return opened;
}

PosixFile::Descriptor PosixFile::Use(bool may_wait) { return OpenFiles::Instance().Use(*this, may_wait); }

bool PosixFile::GiveUpDirect(const Descriptor& descriptor) {
  if (!opened_direct_) return false;
  direct_ = false;
  const int flags = fcntl(descriptor->value(), F_GETFL);
  return flags >= 0 && fcntl(descriptor->value(), F_SETFL, flags & ~O_DIRECT) == 0;
}

std::size_t PosixFile::Read(std::uint64_t offset, void* data, std::size_t size) {
  const Descriptor descriptor = Use();
  bool again = false;
  std::size_t at = 0;
  while (at < size) {
    const ssize_t n =
        pread(descriptor->value(), static_cast<char*>(data) + at, size - at, static_cast<off_t>(offset + at));
    if (n == 0) break;
    if (n > 0) at += static_cast<std::size_t>(n);
    if (n >= 0 || errno == EINTR) continue;
    const int code = errno;
    if (code == EINVAL && !again && (again = GiveUpDirect(descriptor))) continue;
    throw IoError(code, path_, Range("read", size, offset));
  }
  return at;
}

void PosixFile::Write(std::uint64_t offset, const void* data, std::size_t size) {
  const Descriptor descriptor = Use();
  unsynced_ = true;
  bool again = false;
  std::size_t at = 0;
  while (at < size) {
    const ssize_t n = pwrite(descriptor->value(), static_cast<const char*>(data) + at, size - at,
                             static_cast<off_t>(offset + at));
    if (n > 0) at += static_cast<std::size_t>(n);
    if (n == 0) throw IoError(ENOSPC, path_, Range("write", size, offset));
    if (n >= 0 || errno == EINTR) continue;
    const int code = errno;
    if (code == EINVAL && !again && (again = GiveUpDirect(descriptor))) continue;
    throw IoError(code, path_, Range("write", size, offset));
  }
}

void PosixFile::Sync() {
  const std::lock_guard lock(syncing_);
  const Descriptor descriptor = Use();
  unsynced_ = false;
  if (failed_sync_ != 0) throw IoError(failed_sync_, path_, "sync");
  if (fdatasync(descriptor->value()) == 0) return;
  const int code = errno;
  unsynced_ = true;
  throw IoError(code, path_, "sync");
}

// Call it with syncing_ held. If this sync fails, the next Sync throws its error.
void PosixFile::SyncBeforeClosing(const Descriptor& descriptor) {
  unsynced_ = false;
  if (fdatasync(descriptor->value()) != 0) failed_sync_ = errno;
}

void PosixFile::Truncate(std::uint64_t size) {
  const Descriptor descriptor = Use();
  unsynced_ = true;
  if (ftruncate(descriptor->value(), static_cast<off_t>(size)) != 0) {
    throw IoError(errno, path_, "truncate to " + std::to_string(size) + " bytes");
  }
}

std::uint64_t PosixFile::Size() {
  const Descriptor descriptor = Use();
  struct stat status{};
  if (fstat(descriptor->value(), &status) != 0) throw IoError(errno, path_, "stat");
  return static_cast<std::uint64_t>(status.st_size);
}

}  // namespace tierstore
