#include "io/fault_env.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>

#include "io/errors.h"

namespace tierstore {

class FaultFile final : public File {
 public:
  FaultFile(FaultEnv& env, std::unique_ptr<File> base) : env_(env), base_(std::move(base)) {}

  std::shared_ptr<const void> Hold(bool may_wait) override { return base_->Hold(may_wait); }
  std::size_t Read(std::uint64_t offset, void* data, std::size_t size) override {
    env_.Begin("read", path());
    return env_.Distort(static_cast<std::byte*>(data), base_->Read(offset, data, size));
  }
  void Write(std::uint64_t offset, const void* data, std::size_t size) override {
    env_.Begin("write", path());
    const std::uint64_t before = base_->Size();
    const std::uint64_t growth = offset + size > before ? offset + size - before : 0;
    const std::uint64_t granted = env_.Grow(growth);
    const std::size_t fits = size - static_cast<std::size_t>(std::min<std::uint64_t>(growth - granted, size));
    base_->Write(offset, data, fits);
    if (fits < size) throw IoError(ENOSPC, path(), "write " + std::to_string(size) + " bytes");
  }
  void Sync() override {
    env_.Begin("sync", path());
    base_->Sync();
  }
  void Truncate(std::uint64_t size) override {
    env_.Begin("truncate", path());
    base_->Truncate(size);
  }
  std::uint64_t Size() override { return base_->Size(); }
  const std::string& path() const override { return base_->path(); }

 private:
  FaultEnv& env_;
  const std::unique_ptr<File> base_;
};

std::unique_ptr<File> FaultEnv::Open(const std::string& path, OpenMode mode, bool direct) {
  Begin(mode == OpenMode::kCreate ? "create" : "open", path);
  return std::make_unique<FaultFile>(*this, base_.Open(path, mode, direct));
}

std::vector<std::string> FaultEnv::List(const std::string& directory) {
  Begin("list", directory);
  return base_.List(directory);
}

void FaultEnv::Rename(const std::string& from, const std::string& to) {
  Begin("rename", from);
  base_.Rename(from, to);
}

void FaultEnv::Remove(const std::string& path) {
  Begin("remove", path);
  if (base_.Exists(path)) {
    const std::uint64_t size = base_.Open(path, OpenMode::kRead, false)->Size();
    std::lock_guard lock(mutex_);
    used_ -= std::min(used_, size);
  }
  base_.Remove(path);
}

void FaultEnv::SyncDirectory(const std::string& directory) {
  Begin("sync_directory", directory);
  base_.SyncDirectory(directory);
}

void FaultEnv::Fail(const std::string& kind, std::uint64_t nth, int code, bool forever) {
  std::lock_guard lock(mutex_);
  rules_.emplace(kind, Rule{nth, code, forever});
}

void FaultEnv::SetCapacity(std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  capacity_ = bytes;
}

void FaultEnv::FlipBits(std::uint64_t every_nth_read) {
  std::lock_guard lock(mutex_);
  flip_every_ = every_nth_read;
}

void FaultEnv::ShortenReads(std::uint64_t every_nth_read) {
  std::lock_guard lock(mutex_);
  shorten_every_ = every_nth_read;
}

void FaultEnv::SlowDown(double seconds_per_operation) {
  std::lock_guard lock(mutex_);
  delay_seconds_ = seconds_per_operation;
}

void FaultEnv::Heal() {
  std::lock_guard lock(mutex_);
  rules_.clear();
  capacity_ = ~std::uint64_t{0};
  flip_every_ = shorten_every_ = 0;
  delay_seconds_ = 0;
}

std::map<std::string, std::uint64_t> FaultEnv::Counts() {
  std::lock_guard lock(mutex_);
  return counts_;
}

void FaultEnv::Begin(const std::string& kind, const std::string& path) {
  double delay = 0;
  int code = 0;
  {
    std::lock_guard lock(mutex_);
    ++counts_[kind];
    delay = delay_seconds_;
    const auto [first, last] = rules_.equal_range(kind);
    for (auto rule = first; rule != last; ++rule) {
      if (rule->second.countdown > 0 && --rule->second.countdown == 0) {
        code = rule->second.code;
        if (rule->second.forever) rule->second.countdown = 1;
      }
    }
  }
  if (delay > 0) Serve(delay);
  if (code == ENOMEM) throw std::bad_alloc();
  if (code != 0) throw IoError(code, path, kind + " (injected)");
}

void FaultEnv::Serve(double seconds) {
  std::unique_lock lock(mutex_);
  most_at_once_ = std::max(most_at_once_, ++waiting_);
  served_.wait(lock, [this] { return at_once_ == 0 || serving_ < at_once_; });
  ++serving_;
  lock.unlock();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  lock.lock();
  --serving_;
  --waiting_;
  served_.notify_one();
}

unsigned FaultEnv::MostAtOnce() {
  std::lock_guard lock(mutex_);
  return most_at_once_;
}

std::uint64_t FaultEnv::FreeBytes(const std::string& directory) {
  const std::uint64_t below = base_.FreeBytes(directory);
  std::lock_guard lock(mutex_);
  return std::min(below, capacity_ - std::min(capacity_, used_));
}

std::uint64_t FaultEnv::Grow(std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  const std::uint64_t granted = std::min(bytes, capacity_ > used_ ? capacity_ - used_ : 0);
  used_ += granted;
  return granted;
}

std::size_t FaultEnv::Distort(std::byte* data, std::size_t size) {
  std::lock_guard lock(mutex_);
  ++reads_;
  if (size > 0 && flip_every_ > 0 && reads_ % flip_every_ == 0) {
    data[reads_ * 7919 % size] ^= std::byte{1} << (reads_ % 8);
  }
  return shorten_every_ > 0 && reads_ % shorten_every_ == 0 ? size / 2 : size;
}

}  // namespace tierstore
