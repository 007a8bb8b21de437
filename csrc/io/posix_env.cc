#include "io/posix_env.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "io/aligned_buffer.h"
#include "io/errors.h"

namespace tierstore {
namespace {

std::string Range(const char* verb, std::size_t size, std::uint64_t offset) {
  return std::string(verb) + " " + std::to_string(size) + " bytes at offset " + std::to_string(offset);
}

// A store holds one descriptor per segment, so the soft limit of 1024 that shells give is soon reached.
void RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 1 << 16);
  setrlimit(RLIMIT_NOFILE, &limit);
}

int OpenDescriptor(const std::string& path, int flags) {
  int descriptor = open(path.c_str(), flags, 0644);
  if (descriptor < 0 && errno == EMFILE) {
    RaiseDescriptorLimit();
    descriptor = open(path.c_str(), flags, 0644);
  }
  return descriptor;
}

class Posix final : public Env {
 public:
  std::unique_ptr<File> Open(const std::string& path, OpenMode mode, bool direct) override {
    // Never through a link: a store directory from elsewhere must not lead out of itself.
    int flags = O_CLOEXEC | O_NOFOLLOW | (mode == OpenMode::kRead ? O_RDONLY : O_RDWR);
    if (mode == OpenMode::kCreate) flags |= O_CREAT | O_EXCL;
    int descriptor = OpenDescriptor(path, flags | (direct ? O_DIRECT : 0));
    if (descriptor < 0 && direct && errno == EINVAL) {
      // Some file systems create the file before they refuse O_DIRECT.
      if (mode == OpenMode::kCreate) flags &= ~O_EXCL;
      descriptor = OpenDescriptor(path, flags);
    }
    if (descriptor < 0) throw IoError(errno, path, mode == OpenMode::kCreate ? "create" : "open");
    auto file = std::make_unique<PosixFile>(descriptor, path);
    struct stat status{};
    if (fstat(descriptor, &status) != 0) throw IoError(errno, path, "stat");
    if (!S_ISREG(status.st_mode)) throw IoError(EINVAL, path, "open something that is not a regular file");
    return file;
  }

  bool Exists(const std::string& path) override {
    struct stat status{};
    if (lstat(path.c_str(), &status) == 0) return true;
    if (errno == ENOENT) return false;
    throw IoError(errno, path, "stat");
  }

  std::vector<std::string> List(const std::string& directory) override {
    DIR* stream = opendir(directory.c_str());
    if (stream == nullptr) throw IoError(errno, directory, "list");
    std::vector<std::string> names;
    while (true) {
      errno = 0;
      const dirent* entry = readdir(stream);
      if (entry == nullptr) break;
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    const int code = errno;
    closedir(stream);
    if (code != 0) throw IoError(code, directory, "list");
    return names;
  }

  void Rename(const std::string& from, const std::string& to) override {
    if (rename(from.c_str(), to.c_str()) != 0) throw IoError(errno, to, "rename " + from + " to it");
  }

  void Remove(const std::string& path) override {
    if (unlink(path.c_str()) != 0 && errno != ENOENT) throw IoError(errno, path, "remove");
  }

  void SyncDirectory(const std::string& directory) override {
    const int descriptor = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) throw IoError(errno, directory, "open");
    const int code = fsync(descriptor) == 0 ? 0 : errno;
    close(descriptor);
    if (code != 0) throw IoError(code, directory, "sync");
  }

  std::unique_ptr<BatchReader> NewBatchReader(ReadEngine engine, unsigned queue_depth) override {
    if (engine != ReadEngine::kPread) {
      if (auto reader = NewUringReader(queue_depth)) return reader;
      if (engine == ReadEngine::kIoUring) {
        throw IoError(ENOSYS, "io_uring",
                      "set up a ring (this kernel or container refuses it; use io='pread')");
      }
    }
    return NewPreadReader(std::min(queue_depth, 32u));
  }
};

class SerialReader final : public BatchReader {
 public:
  void Read(std::span<const ReadRequest> requests, const Done& done) override {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const ReadRequest& request = requests[i];
      done(i, buffer_.data(), request.file->Read(request.offset, buffer_.data(), request.size));
    }
  }
  const char* name() const override { return "serial"; }

 private:
  AlignedBuffer buffer_{kMaxReadBytes};
};

}  // namespace

PosixFile::~PosixFile() { close(descriptor_); }

std::size_t PosixFile::Read(std::uint64_t offset, void* data, std::size_t size) {
  std::size_t at = 0;
  while (at < size) {
    const ssize_t n =
        pread(descriptor_, static_cast<char*>(data) + at, size - at, static_cast<off_t>(offset + at));
    if (n == 0) break;
    if (n > 0) at += static_cast<std::size_t>(n);
    if (n < 0 && errno != EINTR) throw IoError(errno, path_, Range("read", size, offset));
  }
  return at;
}

void PosixFile::Write(std::uint64_t offset, const void* data, std::size_t size) {
  std::size_t at = 0;
  while (at < size) {
    const ssize_t n =
        pwrite(descriptor_, static_cast<const char*>(data) + at, size - at, static_cast<off_t>(offset + at));
    if (n > 0) at += static_cast<std::size_t>(n);
    if (n == 0) throw IoError(ENOSPC, path_, Range("write", size, offset));
    if (n < 0 && errno != EINTR) throw IoError(errno, path_, Range("write", size, offset));
  }
}

void PosixFile::Sync() {
  if (fdatasync(descriptor_) != 0) throw IoError(errno, path_, "sync");
}

void PosixFile::Truncate(std::uint64_t size) {
  if (ftruncate(descriptor_, static_cast<off_t>(size)) != 0) {
    throw IoError(errno, path_, "truncate to " + std::to_string(size) + " bytes");
  }
}

std::uint64_t PosixFile::Size() {
  struct stat status{};
  if (fstat(descriptor_, &status) != 0) throw IoError(errno, path_, "stat");
  return static_cast<std::uint64_t>(status.st_size);
}

Env& PosixEnv() {
  static Posix* env = new Posix;  // never destroyed: files may be closed during exit
  return *env;
}

std::unique_ptr<BatchReader> NewSerialReader() { return std::make_unique<SerialReader>(); }

}  // namespace tierstore
