#include "store/read_cost.h"

#include <algorithm>
#include <chrono>
#include <random>

#include "common/crc32c.h"
#include "io/aligned_buffer.h"
#include "io/errors.h"
#include "store/coding.h"
#include "store/format.h"

namespace tierstore {
namespace {

constexpr char kMagic[9] = "TSTDEVIC";
constexpr std::size_t kEncodedBytes = 8 + 4 + 4 + 8 * ReadCost::kSizes.size();  // without the checksum
constexpr std::int64_t kReadsPerRound = 256;
constexpr std::size_t kRounds = 4;

}  // namespace

// A read costs about a + b·bytes, so reading over a gap of a / b bytes costs as much as another read.
std::uint64_t ReadCost::MergeGap() const {
  const double smallest = nanoseconds.front(), largest = nanoseconds.back();
  const double bytes = kSizes.back() - kSizes.front();
  const double per_byte = std::max(largest - smallest, 1.0) / bytes;
  const double each = smallest - per_byte * kSizes.front();
  return static_cast<std::uint64_t>(std::clamp(each / per_byte, 1.0, bytes));
}

// A disturbance makes a round longer, and so do buffers that were never used. So the sizes take turns, and
// the shortest round of each size counts.
ReadCost ReadCost::Measure(BatchReader& reader, const std::vector<File*>& files) {
  using Clock = std::chrono::steady_clock;
  std::mt19937_64 random(1);
  std::vector<ReadRequest> requests(kReadsPerRound);
  std::array<std::int64_t, kSizes.size()> shortest;
  shortest.fill(std::int64_t{1} << 30);
  for (std::size_t round = 0; round < kRounds * kSizes.size(); ++round) {
    const std::size_t i = round % kSizes.size();
    for (ReadRequest& request : requests) {
      File* const file = files[random() % files.size()];
      const std::uint64_t places = file->Size() / kSizes[i];
      request = {file, random() % places * kSizes[i], kSizes[i]};
    }
    const auto start = Clock::now();
    reader.Read(requests, [](std::size_t, const std::byte*, std::size_t) {});
    const auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
    shortest[i] = std::clamp<std::int64_t>(spent / kReadsPerRound, 1, shortest[i]);
  }
  ReadCost cost;
  std::copy(shortest.begin(), shortest.end(), cost.nanoseconds.begin());
  return cost;
}

std::optional<ReadCost> ReadCost::Load(Env& env, const std::string& directory) try {
  const std::string path = directory + "/" + kReadCostName;
  if (!env.Exists(path)) return std::nullopt;
  AlignedBuffer block(kBlockBytes);
  if (env.Open(path, OpenMode::kRead, false)->Read(0, block.data(), kBlockBytes) != kBlockBytes)
    return std::nullopt;
  Decoder in({block.data(), kBlockBytes}, path);
  if (std::memcmp(in.Take(8), kMagic, 8) != 0 || in.Get<std::uint32_t>() != kFormatVersion)
    return std::nullopt;
  if (in.Get<std::uint32_t>() != kSizes.size()) return std::nullopt;
  ReadCost cost;
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    if (in.Get<std::uint32_t>() != kSizes[i]) return std::nullopt;
    cost.nanoseconds[i] = in.Get<std::uint32_t>();
  }
  if (in.Get<std::uint32_t>() != Crc32c(block.data(), kEncodedBytes)) return std::nullopt;
  return cost;
} catch (const IoError&) {
  return std::nullopt;
}

std::uint64_t ReadCost::Save(Env& env, const std::string& directory) const {
  Encoder out;
  out.Raw(kMagic, 8).Put(kFormatVersion).Put(static_cast<std::uint32_t>(kSizes.size()));
  for (std::size_t i = 0; i < kSizes.size(); ++i) out.Put(kSizes[i]).Put(nanoseconds[i]);
  out.Put(Crc32c(out.bytes().data(), out.bytes().size()));
  AlignedBuffer block(kBlockBytes);
  std::memcpy(block.data(), out.bytes().data(), out.bytes().size());
  const std::string temporary = directory + "/" + kReadCostTemporaryName;
  env.Remove(temporary);
  env.Open(temporary, OpenMode::kCreate, false)->Write(0, block.data(), kBlockBytes);
  env.Rename(temporary, directory + "/" + kReadCostName);
  return kBlockBytes;
}

}  // namespace tierstore
