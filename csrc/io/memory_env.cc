#include "io/memory_env.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "io/errors.h"

namespace tierstore {
namespace {

constexpr std::size_t kSectorBytes = 512;

std::string DirectoryOf(const std::string& path) { return path.substr(0, path.rfind('/')); }

void Store(std::vector<std::byte>& data, std::uint64_t offset, const std::byte* from, std::size_t size) {
  if (data.size() < offset + size) data.resize(offset + size);
  if (size > 0) std::memcpy(data.data() + offset, from, size);
}

}  // namespace

class MemoryFile final : public File {
 public:
  MemoryFile(MemoryEnv& env, std::shared_ptr<MemoryEnv::Inode> inode, std::string path)
      : env_(env), inode_(std::move(inode)), path_(std::move(path)) {}

  std::size_t Read(std::uint64_t offset, void* data, std::size_t size) override {
    std::lock_guard lock(env_.mutex_);
    const auto& bytes = inode_->data;
    if (offset >= bytes.size()) return 0;
    size = std::min<std::size_t>(size, bytes.size() - offset);
    std::memcpy(data, bytes.data() + offset, size);
    return size;
  }

  void Write(std::uint64_t offset, const void* data, std::size_t size) override {
    std::lock_guard lock(env_.mutex_);
    const auto* bytes = static_cast<const std::byte*>(data);
    Store(inode_->data, offset, bytes, size);
    env_.log_.push_back({MemoryEnv::Kind::kWrite, inode_->id, offset, {bytes, bytes + size}, {}, path_});
  }

  void Sync() override {
    std::lock_guard lock(env_.mutex_);
    env_.log_.push_back({MemoryEnv::Kind::kSync, inode_->id});
  }

  void Truncate(std::uint64_t size) override {
    std::lock_guard lock(env_.mutex_);
    inode_->data.resize(size);
    env_.log_.push_back({MemoryEnv::Kind::kTruncate, inode_->id, size, {}, {}, path_});
  }

  std::uint64_t Size() override {
    std::lock_guard lock(env_.mutex_);
    return inode_->data.size();
  }

  const std::string& path() const override { return path_; }

 private:
  MemoryEnv& env_;
  const std::shared_ptr<MemoryEnv::Inode> inode_;
  const std::string path_;
};

std::unique_ptr<File> MemoryEnv::Open(const std::string& path, OpenMode mode, bool) {
  std::lock_guard lock(mutex_);
  const auto found = names_.find(path);
  if (mode != OpenMode::kCreate) {
    if (found == names_.end()) throw IoError(ENOENT, path, "open");
    return std::make_unique<MemoryFile>(*this, found->second, path);
  }
  if (found != names_.end()) throw IoError(EEXIST, path, "create");
  auto inode = std::make_shared<Inode>(Inode{next_inode_++, {}});
  names_[path] = inode;
  log_.push_back({.kind = Kind::kCreate, .inode = inode->id, .to = path});
  return std::make_unique<MemoryFile>(*this, inode, path);
}

bool MemoryEnv::Exists(const std::string& path) {
  std::lock_guard lock(mutex_);
  return names_.contains(path);
}

std::vector<std::string> MemoryEnv::List(const std::string& directory) {
  std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [path, inode] : names_) {
    if (path.starts_with(directory + "/")) names.push_back(path.substr(directory.size() + 1));
  }
  return names;
}

void MemoryEnv::Rename(const std::string& from, const std::string& to) {
  std::lock_guard lock(mutex_);
  const auto found = names_.find(from);
  if (found == names_.end()) throw IoError(ENOENT, to, "rename " + from + " to this name");
  names_[to] = found->second;
  names_.erase(from);
  log_.push_back({.kind = Kind::kRename, .from = from, .to = to});
}

void MemoryEnv::Remove(const std::string& path) {
  std::lock_guard lock(mutex_);
  if (names_.erase(path) > 0) log_.push_back({.kind = Kind::kRemove, .from = path});
}

void MemoryEnv::SyncDirectory(const std::string& directory) {
  std::lock_guard lock(mutex_);
  log_.push_back({.kind = Kind::kSyncDirectory, .to = directory});
}

std::size_t MemoryEnv::operations() {
  std::lock_guard lock(mutex_);
  return log_.size();
}

// Returns which of the first operations a crash behind them cannot undo.
std::vector<bool> MemoryEnv::Durable(std::size_t operations) const {
  std::vector<bool> durable(operations, false);
  std::map<std::size_t, std::size_t> synced;  // by inode: everything before this operation
  std::set<std::string> directories;          // synced later
  for (std::size_t i = operations; i > 0; --i) {
    const Operation& operation = log_[i - 1];
    switch (operation.kind) {
      case Kind::kSync:
        synced.emplace(operation.inode, i);
        break;
      case Kind::kSyncDirectory:
        directories.insert(operation.to);
        break;
      case Kind::kWrite:
      case Kind::kTruncate:
        durable[i - 1] = synced.contains(operation.inode);
        break;
      default:
        durable[i - 1] =
            directories.contains(DirectoryOf(operation.to.empty() ? operation.from : operation.to));
    }
  }
  return durable;
}

void MemoryEnv::Apply(const Operation& operation, Disk& disk) {
  auto& [inodes, names] = disk;
  auto& inode = inodes[operation.inode];
  if (inode == nullptr) inode = std::make_shared<Inode>(Inode{operation.inode, {}});
  switch (operation.kind) {
    case Kind::kCreate:
      names[operation.to] = operation.inode;
      break;
    case Kind::kWrite:
      Store(inode->data, operation.offset, operation.data.data(), operation.data.size());
      break;
    case Kind::kTruncate:
      inode->data.resize(operation.offset);
      break;
    case Kind::kRename:
      if (names.contains(operation.from)) {
        names[operation.to] = names[operation.from];
        names.erase(operation.from);
      }
      break;
    case Kind::kRemove:
      names.erase(operation.from);
      break;
    default:
      break;
  }
}

// Applies some of the write's sectors.
void MemoryEnv::ApplyTorn(const Operation& operation, Disk& disk, std::mt19937_64& random) {
  const bool prefix = random() % 2 == 0;
  const std::size_t sectors = (operation.data.size() + kSectorBytes - 1) / kSectorBytes;
  const std::size_t kept = random() % (sectors + 1);
  for (std::size_t sector = 0; sector < sectors; ++sector) {
    if (prefix ? sector >= kept : random() % 2 == 0) continue;
    const std::size_t begin = sector * kSectorBytes,
                      end = std::min(operation.data.size(), begin + kSectorBytes);
    Operation part{operation.kind, operation.inode, operation.offset + begin, {}};
    part.data.assign(operation.data.begin() + static_cast<std::ptrdiff_t>(begin),
                     operation.data.begin() + static_cast<std::ptrdiff_t>(end));
    Apply(part, disk);
  }
}

std::unique_ptr<MemoryEnv> MemoryEnv::AfterCrash(std::size_t operations, Unsynced unsynced,
                                                 std::uint64_t seed, const std::string& keeps) {
  std::lock_guard lock(mutex_);
  operations = std::min(operations, log_.size());
  const std::vector<bool> durable = Durable(operations);
  std::mt19937_64 random(seed);
  Disk disk;
  for (const auto& [id, inode] : before_log_.first) disk.first[id] = std::make_shared<Inode>(*inode);
  disk.second = before_log_.second;
  for (std::size_t i = 0; i < operations; ++i) {
    const Operation& operation = log_[i];
    const std::uint64_t choice = unsynced == Unsynced::kRandom ? random() % 3
                                 : unsynced == Unsynced::kKept ? 0
                                                               : 1;
    const bool kept =
        !keeps.empty() && (operation.to.starts_with(keeps + "/") || operation.from.starts_with(keeps + "/"));
    if (durable[i] || kept || choice == 0) {
      Apply(operation, disk);
    } else if (choice == 2 && operation.kind == Kind::kWrite) {
      ApplyTorn(operation, disk, random);
    }
  }
  auto image = std::make_unique<MemoryEnv>();
  for (const auto& [name, id] : disk.second) {
    auto& inode = disk.first[id];
    if (inode == nullptr) inode = std::make_shared<Inode>(Inode{id, {}});
    image->names_[name] = inode;
    image->before_log_.first[id] = std::make_shared<Inode>(*inode);
    image->before_log_.second[name] = id;
  }
  image->next_inode_ = next_inode_;
  return image;
}

std::vector<std::byte> MemoryEnv::Contents(const std::string& path) {
  std::lock_guard lock(mutex_);
  const auto found = names_.find(path);
  if (found == names_.end()) throw IoError(ENOENT, path, "open");
  return found->second->data;
}

void MemoryEnv::SetContents(const std::string& path, std::vector<std::byte> contents) {
  std::lock_guard lock(mutex_);
  auto& inode = names_[path];
  if (inode == nullptr) inode = std::make_shared<Inode>(Inode{next_inode_++, {}});
  inode->data = std::move(contents);
}

}  // namespace tierstore
