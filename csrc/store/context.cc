#include "store/context.h"

#include <unistd.h>

#include "store/errors.h"

namespace tierstore {

StoreContext::StoreContext(Env& files, std::string path, const StoreConfig& settings)
    : env(files), directory(std::move(path)), config(settings), pid_(getpid()) {}

bool StoreContext::InOwnProcess() const { return getpid() == pid_ && fork_count_ == ForkCount(); }

void StoreContext::CheckOpen() const {
  if (closed_) throw ClosedError("the store is closed");
  if (!InOwnProcess()) {
    throw ClosedError(
        "the store was opened before this process was forked; open it in the process that uses it");
  }
}

void StoreContext::CheckWritable() const {
  CheckOpen();
  if (config.read_only)
    throw InputError(directory + ": the store is opened read-only; open it without read_only to change it");
}

}  // namespace tierstore
