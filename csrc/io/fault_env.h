// An Env around another that fails on request: errors at the nth operation of a kind, a device that is full,
// reads that come short or with a bit flipped, a device that is slow and serves few operations at once.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>

#include "io/env.h"

namespace tierstore {

class FaultEnv final : public Env {
 public:
  // Kinds of operations: "open", "create", "read", "write", "sync", "truncate", "rename", "remove", "list",
  // "sync_directory".
  // `at_once`: operations that the device serves at once while it is slow, and batches are read by threads
  // then; 0: it serves all, and batches are read one request after the other.
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

  // The nth operation of this kind from now on (1 is the next) fails with `code`, and if `forever` all later
  // operations, too. ENOMEM is no failure of the device, but std::bad_alloc.
  void Fail(const std::string& kind, std::uint64_t nth, int code, bool forever);
  // Writes that would make all files together larger than this fail with ENOSPC, half done.
  void SetCapacity(std::uint64_t bytes);
  // Reads flip one bit of every nth byte range that they return; 0: none.
  void FlipBits(std::uint64_t every_nth_read);
  // The file seems to end in the middle of every nth read; 0: none.
  void ShortenReads(std::uint64_t every_nth_read);
  void SlowDown(double seconds_per_operation);
  // Ends all faults.
  void Heal();
  std::map<std::string, std::uint64_t> Counts();
  // The most operations that were under way at once.
  unsigned MostAtOnce();

 private:
  friend class FaultFile;

  struct Rule {
    std::uint64_t countdown;
    int code;
    bool forever;
  };

  // Counts the operation; throws when it is to fail.
  void Begin(const std::string& kind, const std::string& path);
  // Returns how many of `bytes` more bytes there is room for.
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
