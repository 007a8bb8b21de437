// Facts for all parts of a store: where its files are, how it was opened, and whether it is still open.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <string>

#include "common/fork.h"
#include "io/env.h"
#include "store/config.h"

namespace tierstore {

// A context needs no lock: only its atomic member changes after opening.
class StoreContext {
 public:
  // `files` must live longer than the context.
  StoreContext(Env& files, std::string path, const StoreConfig& settings);

  Env& env;
  const std::string directory;
  const StoreConfig config;
  StoreId id{};  // set once, by Recovery

  std::string PathOf(const std::string& name) const { return directory + "/" + name; }

  // Returns false in a forked child, which must not touch the parent's threads and files.
  bool InOwnProcess() const;
  // Throws ClosedError after MarkClosed and in a forked child.
  void CheckOpen() const;
  // Throws as CheckOpen does, and InputError when the store was opened read-only.
  void CheckWritable() const;
  void MarkClosed() { closed_ = true; }

 private:
  std::atomic<bool> closed_{false};
  const pid_t pid_;
  const unsigned fork_count_ = ForkCount();
};

}  // namespace tierstore
