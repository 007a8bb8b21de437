// A ring that the kernel refuses in the middle of a read: requests that have arrived are not made again,
// since nothing keeps their files. Fails by abort.
#include "io/auto_reader.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "common/tests/check.h"
#include "io/aligned_buffer.h"
#include "io/env.h"

using namespace tierstore;

namespace {

// Delivers the first `good` requests, the last of them first, and is refused then.
class RefusedRing final : public BatchReader {
 public:
  explicit RefusedRing(std::size_t good) : good_(good) {}

  void Read(std::span<const ReadRequest> requests, const Done& done) override {
    AlignedBuffer buffer(kBlockBytes);
    for (std::size_t i = good_; i > 0; --i) {
      const ReadRequest& request = requests[i - 1];
      done(i - 1, buffer.data(), request.file->Read(request.offset, buffer.data(), request.size));
    }
    throw RingError(EPERM);
  }
  const char* name() const override { return "uring"; }

 private:
  const std::size_t good_;
};

class Files {
 public:
  Files(const std::string& folder, std::size_t count) {
    AlignedBuffer block(kBlockBytes);
    for (std::size_t i = 0; i < count; ++i) {
      std::memset(block.data(), static_cast<int>(i + 1), kBlockBytes);
      files_.push_back(PosixEnv().Create(folder + "/" + std::to_string(i), false, kBlockBytes));
      files_.back()->Write(0, block.data(), kBlockBytes);
      requests.push_back({files_.back().get(), 0, kBlockBytes});
    }
  }
  void Remove(std::size_t number) {
    PosixEnv().Remove(files_[number]->path());
    files_[number].reset();
  }

  std::vector<ReadRequest> requests;

 private:
  std::vector<std::unique_ptr<File>> files_;
};

// Reads as many files, twice; each file is removed when it has arrived.
void ReadAll(const std::string& folder, std::size_t count, std::size_t good) {
  AutoReader reader(std::make_unique<RefusedRing>(good), 4, 1);
  for (int turn = 0; turn < 2; ++turn) {
    Files files(folder, count);
    std::set<std::size_t> seen;
    reader.Read(files.requests, [&](std::size_t request, const std::byte* data, std::size_t size) {
      CHECK(seen.insert(request).second);
      CHECK(size == kBlockBytes && data[size - 1] == static_cast<std::byte>(request + 1));
      files.Remove(request);
    });
    CHECK(seen.size() == count);
    CHECK(std::string(reader.name()) == "pread");
  }
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  for (const std::size_t count : {1, 7, 40}) {
    for (const std::size_t good : {std::size_t{0}, std::size_t{1}, count / 2, count})
      ReadAll(argv[1], count, good);
  }
  std::puts("ok");
}
