#include "io/posix_env.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>

#include "common/call_limit.h"
#include "io/aligned_buffer.h"
#include "io/auto_reader.h"
#include "io/errors.h"

namespace tierstore {
namespace {

class Posix final : public Env {
 public:
  explicit Posix(std::shared_ptr<Folder> folder) : folder_(std::move(folder)) {}

  std::unique_ptr<File> Open(const std::string& path, OpenMode mode, bool direct) override {
    return std::make_unique<PosixFile>(folder_, path, mode, direct);
  }

  bool Exists(const std::string& path) override {
    struct stat status{};
    int at;
    const char* const name = folder_->Resolve(path, &at);
    if (fstatat(at, name, &status, AT_SYMLINK_NOFOLLOW) == 0) return true;
    if (errno == ENOENT) return false;
    throw IoError(errno, path, "stat");
  }

  std::vector<std::string> List(const std::string& directory) override {
    DIR* stream = nullptr;
    const int descriptor = OpenDirectory(directory);
    if (descriptor < 0 || (stream = fdopendir(descriptor)) == nullptr) {
      const int code = errno;
      if (descriptor >= 0) close(descriptor);
      throw IoError(code, directory, "list");
    }
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
    OpenFiles::Instance().Pin(from);
    OpenFiles::Instance().Pin(to);
    int at_from, at_to;
    const char* const old_name = folder_->Resolve(from, &at_from);
    const char* const new_name = folder_->Resolve(to, &at_to);
    if (renameat(at_from, old_name, at_to, new_name) != 0) {
      throw IoError(errno, to, "rename " + from + " to this name");
    }
  }

  void Remove(const std::string& path) override {
    OpenFiles::Instance().Pin(path);
    int at;
    const char* const name = folder_->Resolve(path, &at);
    if (unlinkat(at, name, 0) != 0 && errno != ENOENT) throw IoError(errno, path, "remove");
  }

  void SyncDirectory(const std::string& directory) override {
    if (folder_->descriptor.value() >= 0 && directory == folder_->path) {
      if (fsync(folder_->descriptor.value()) != 0) throw IoError(errno, directory, "sync");
      return;
    }
    const OwnDescriptor descriptor([&] { return OpenDirectory(directory); });
    if (descriptor.error() != 0) throw IoError(descriptor.error(), directory, "open");
    if (fsync(descriptor.value()) != 0) throw IoError(errno, directory, "sync");
  }

  std::unique_ptr<BatchReader> NewBatchReader(ReadEngine engine, unsigned queue_depth,
                                              unsigned devices) override {
    if (engine == ReadEngine::kPread) return NewPreadReader(queue_depth, devices);
    int error = 0;
    auto ring = NewUringReader(queue_depth, devices, &error);
    if (engine == ReadEngine::kIoUring) {
      if (ring != nullptr) return ring;
      throw IoError(error, "io_uring",
                    "set up a ring (this kernel or container refuses io_uring; use io='pread')");
    }
    if (ring == nullptr) return NewPreadReader(queue_depth, devices);
    return std::make_unique<AutoReader>(std::move(ring), queue_depth, devices);
  }

  std::uint64_t FreeBytes(const std::string& directory) override {
    struct statvfs found{};
    const bool held = folder_->descriptor.value() >= 0 && directory == folder_->path;
    if ((held ? fstatvfs(folder_->descriptor.value(), &found) : statvfs(directory.c_str(), &found)) != 0)
      throw IoError(errno, directory, "ask for the free space");
    return std::uint64_t{found.f_bavail} * found.f_frsize;
  }

  void Close() override { folder_->descriptor.Close(); }

 private:
  int OpenDirectory(const std::string& directory) const {
    const bool held = folder_->descriptor.value() >= 0 && directory == folder_->path;
    return openat(held ? folder_->descriptor.value() : AT_FDCWD, held ? "." : directory.c_str(),
                  O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  }

  const std::shared_ptr<Folder> folder_;
};

class SerialReader final : public BatchReader {
 public:
  void Read(std::span<const ReadRequest> requests, const Done& done) override {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const ReadRequest& request = requests[i];
      CheckCall();
      done(i, buffer_.data(), request.file->Read(request.offset, buffer_.data(), request.size));
    }
  }
  const char* name() const override { return "serial"; }

 private:
  AlignedBuffer buffer_{kMaxReadBytes};
};

}  // namespace

const char* Folder::Resolve(const std::string& name, int* at) const {
  const std::size_t prefix = path.size() + 1;
  const bool inside = descriptor.value() >= 0 && name.size() > prefix && name[path.size()] == '/' &&
                      name.starts_with(path) && name.find('/', prefix) == std::string::npos;
  *at = inside ? descriptor.value() : AT_FDCWD;
  return name.c_str() + (inside ? prefix : 0);
}

Env& PosixEnv() {
  // The Env is never destroyed, since files may be closed while the process ends.
  static Posix* env = new Posix(std::make_shared<Folder>());
  return *env;
}

std::unique_ptr<Env> NewPosixEnv(const std::string& directory) {
  auto folder = std::make_shared<Folder>();
  folder->path = directory;
  const auto open_folder = [&] {
    return open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  };
  folder->descriptor = OwnDescriptor(open_folder);
  if (folder->descriptor.error() != 0) throw IoError(folder->descriptor.error(), directory, "open");
  return std::make_unique<Posix>(std::move(folder));
}

std::unique_ptr<BatchReader> NewSerialReader() { return std::make_unique<SerialReader>(); }

}  // namespace tierstore
