// FaultEnv is an Env around another Env that fails on request: the nth operation of a kind throws an error,
// the device is full or slow or serves few operations at once, reads are short or have a flipped bit.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>

#include "io/env.h"

namespace tierstore {

class FaultEnv final : public Env {
 public:
  // The kinds of operations are "open", "create", "read", "write", "sync", "truncate", "rename", "remove",
  // "list" and "sync_directory".
  //
  // A slow device serves `at_once` operations at a time, and threads read batches. With 0 the device serves
  // all operations at once, and batches are read one request after the other.
  explicit FaultEnv(Env& base, unsigned at_once = 0) : base_(base), at_once_(at_once) {}

  std::unique_ptr<File> Open(const std::string& path, OpenMode mode, bool direct) override;
  bool Exists(const std::string& path) override { return base_.Exists(path); }
  std::vector<std::string> List(const std::string& directory) override;
  void Rename(const std::string& from, const std::string& to) override;
  void Remove(const std::string& path) override;
  void SyncDirectory(const std::string& directory) override;
  std::unique_ptr<BatchReader> NewBatchReader(ReadEngine, unsigned queue_depth, unsigned devices) override {
    return at_once_ == 0 ? NewSerialReader() : NewPreadReader(queue_depth, devices);
  }
  std::uint64_t FreeBytes(const std::string& directory) override;

  // Lets the nth operation of this kind from now on (1 is the next) fail with `code`, and if `forever` all
  // later operations, too. ENOMEM throws std::bad_alloc instead of an error of the device.
  void Fail(const std::string& kind, std::uint64_t nth, int code, bool forever);
  // Lets writes fail with ENOSPC, half done, that would make all files together larger than this.
  void SetCapacity(std::uint64_t bytes);
  // Flips one bit of the bytes of every nth read; 0 ends that.
  void FlipBits(std::uint64_t every_nth_read);
  // Lets the file end in the middle of every nth read; 0 ends that.
  void ShortenReads(std::uint64_t every_nth_read);
  void SlowDown(double seconds_per_operation);
  // Ends all faults.
  void Heal();
  std::map<std::string, std::uint64_t> Counts();
  // Returns the most operations that were under way at once.
  unsigned MostAtOnce();

 private:
  friend class FaultFile;

  struct Rule {
    std::uint64_t countdown;
    int code;
    bool forever;
  };

  // Counts the operation, and throws when the operation is to fail.
  void Begin(const std::string& kind, const std::string& path);
  // Takes room for up to `bytes` more bytes, and returns the number of bytes that got room.
  std::uint64_t Grow(std::uint64_t bytes);
  std::size_t Distort(std::byte* data, std::size_t size);
  void Serve(double seconds);

  Env& base_;
  const unsigned at_once_;
  std::mutex mutex_;  // guards all that follows
  std::condition_variable served_;
  unsigned waiting_ = 0, serving_ = 0, most_at_once_ = 0;
  std::map<std::string, std::uint64_t> counts_;
  std::multimap<std::string, Rule> rules_;
  std::uint64_t capacity_ = ~std::uint64_t{0}, used_ = 0;
  std::uint64_t flip_every_ = 0, shorten_every_ = 0, reads_ = 0;
  double delay_seconds_ = 0;
};

}  // namespace tierstore
