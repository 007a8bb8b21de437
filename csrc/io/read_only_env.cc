#include "io/read_only_env.h"

#include <cerrno>

#include "io/errors.h"

namespace tierstore {

std::unique_ptr<File> ReadOnlyEnv::Open(const std::string& path, OpenMode mode, bool direct) {
  if (mode == OpenMode::kCreate) throw IoError(EROFS, path, "create in a store that is opened read-only");
  return base_.Open(path, OpenMode::kRead, direct);
}

void ReadOnlyEnv::Rename(const std::string&, const std::string& to) {
  throw IoError(EROFS, to, "replace in a store that is opened read-only");
}

}  // namespace tierstore
