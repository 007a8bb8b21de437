#include "io/device_probe.h"

#include <chrono>
#include <random>
#include <vector>

#include "io/errors.h"

namespace tierstore {

double ProbeReads(Env& env, const std::string& path, std::uint32_t block_bytes, unsigned queue_depth,
                  double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr std::size_t kReadsAtOnce = 8192;  // so many that the short queue at the end hardly counts
  const auto file = env.Open(path, OpenMode::kRead, true);
  const std::uint64_t places = file->Size() / block_bytes;
  if (places == 0)
    throw IoError(EINVAL, path, "read " + std::to_string(block_bytes) + " bytes of a file that has fewer");
  const auto reader = env.NewBatchReader(ReadEngine::kAuto, queue_depth);
  std::mt19937_64 random(1);
  std::vector<ReadRequest> requests(kReadsAtOnce);
  std::uint64_t count = 0;
  double spent = 0;
  while (spent < seconds || count == 0) {
    for (ReadRequest& request : requests)
      request = {file.get(), random() % places * block_bytes, block_bytes};
    const auto start = Clock::now();
    reader->Read(requests, [&](std::size_t, const std::byte*, std::size_t) { ++count; });
    spent += std::chrono::duration<double>(Clock::now() - start).count();
  }
  return static_cast<double>(count) / spent;
}

}  // namespace tierstore
