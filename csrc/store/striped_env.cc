#include "store/striped_env.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <utility>

#include "common/call_limit.h"
#include "io/aligned_buffer.h"
#include "io/errors.h"
#include "store/all_at_once.h"
#include "store/errors.h"
#include "store/manifest.h"

namespace tierstore {
namespace {

// A device must have room for this many shares of a new segment, so that its file system is not filled to the
// last block.
constexpr std::uint64_t kSharesOfRoom = 2;

std::uint64_t RandomStamp() {
  std::random_device random;
  return std::uint64_t{random()} << 32 | random();
}

std::optional<PartHeader> ReadHeader(File& file) {
  AlignedBuffer block(kBlockBytes);
  const std::size_t got = file.Read(0, block.data(), block.size());
  return PartHeader::Decode({block.data(), got}, file.path());
}

// Reads the parts of striped files, each by the queue of its device.
class StripedReader final : public BatchReader {
 public:
  explicit StripedReader(std::unique_ptr<BatchReader> base) : base_(std::move(base)) {}

  void Read(std::span<const ReadRequest> requests, const Done& done) override {
    std::vector<ReadRequest> of_parts;
    std::vector<std::size_t> numbers, crossing;
    of_parts.reserve(requests.size());
    numbers.reserve(requests.size());
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const auto& file = static_cast<const StripedFile&>(*requests[i].file);
      const StripedFile::Place place = file.At(requests[i].offset);
      if (place.left < requests[i].size) {
        crossing.push_back(i);
        continue;
      }
      const StripedFile::Part& part = file.part(place.part);
      of_parts.push_back({part.file.get(), place.offset, requests[i].size, part.device});
      numbers.push_back(i);
    }
    base_->Read(of_parts, [&](std::size_t request, const std::byte* data, std::size_t size) {
      done(numbers[request], data, size);
    });
    if (crossing.empty()) return;
    AlignedBuffer buffer(kMaxReadBytes);
    for (const std::size_t i : crossing) {
      CheckCall();
      done(i, buffer.data(), requests[i].file->Read(requests[i].offset, buffer.data(), requests[i].size));
    }
  }

  const char* name() const override { return base_->name(); }

 private:
  const std::unique_ptr<BatchReader> base_;
};

}  // namespace

StripedEnv::StripedEnv(std::vector<StripeFolder> folders, std::uint32_t stripe_bytes)
    : folders_(std::move(folders)),
      stripe_bytes_(stripe_bytes),
      changed_(folders_.size()),
      promised_(folders_.size()) {
  if (folders_.empty() || folders_.size() > kMostFolders)
    throw InputError("a store has 1 to " + std::to_string(kMostFolders) + " folders, not " +
                     std::to_string(folders_.size()));
  if (stripe_bytes_ == 0 || stripe_bytes_ % kBlockBytes != 0)
    throw InputError("stripes are whole blocks, not " + std::to_string(stripe_bytes_) + " bytes");
  // A process that changed the folders may have died before a sync.
  for (auto& changed : changed_) changed = true;
}

bool StripedEnv::IsStriped(const std::string& path) const {
  const std::string& directory = folders_[0].path;
  return path.size() > directory.size() && path[directory.size()] == '/' && path.starts_with(directory) &&
         ParseSegmentName(path.substr(directory.size() + 1)).has_value();
}

std::string StripedEnv::PathIn(std::size_t folder, const std::string& path) const {
  return folder == 0 ? path : folders_[folder].path + path.substr(folders_[0].path.size());
}

std::vector<unsigned> StripedEnv::ChooseDevices(std::uint64_t share) {
  std::vector<unsigned> with_room, all;
  const std::uint32_t turn = turn_++;
  for (std::size_t i = 0; i < folders_.size(); ++i) {
    const std::size_t device = (turn + i) % folders_.size();
    all.push_back(static_cast<unsigned>(device));
    if (folders_[device].env->FreeBytes(folders_[device].path) >= promised_[device] + kSharesOfRoom * share)
      with_room.push_back(static_cast<unsigned>(device));
  }
  return with_room.empty() ? all : with_room;
}

std::unique_ptr<File> StripedEnv::Create(const std::string& path, bool direct, std::uint64_t bytes) {
  if (!IsStriped(path)) return Open(path, OpenMode::kCreate, direct);
  const std::vector<unsigned> devices = ChooseDevices(bytes / folders_.size());
  PartHeader header{static_cast<std::uint32_t>(devices.size()), 0, stripe_bytes_, RandomStamp()};
  std::vector<StripedFile::Part> parts;
  try {
    AlignedBuffer block(kBlockBytes);
    for (const unsigned device : devices) {
      const std::string name = PathIn(device, path);
      parts.push_back({folders_[device].env->Open(name, OpenMode::kCreate, direct), device,
                       std::make_unique<Promise>(promised_[device], bytes / devices.size())});
      changed_[device] = true;
      const Bytes encoded = header.Encode();
      std::memcpy(block.data(), encoded.data(), encoded.size());
      parts.back().file->Write(0, block.data(), block.size());
      ++header.part;
    }
  } catch (...) {
    for (const auto& part : parts) {
      try {
        folders_[part.device].env->Remove(PathIn(part.device, path));
      } catch (const IoError&) {  // the next opening removes it
      }
    }
    throw;
  }
  return std::make_unique<StripedFile>(path, std::move(parts), stripe_bytes_);
}

std::unique_ptr<File> StripedEnv::Open(const std::string& path, OpenMode mode, bool direct) {
  if (!IsStriped(path)) {
    if (mode == OpenMode::kCreate) changed_[0] = true;
    return first().Open(path, mode, direct);
  }
  if (mode == OpenMode::kCreate) return Create(path, direct, 0);
  std::vector<StripedFile::Part> parts;
  std::optional<PartHeader> any;
  std::size_t found = 0;
  for (std::size_t i = 0; i < folders_.size(); ++i) {
    const std::string name = PathIn(i, path);
    if (!folders_[i].env->Exists(name)) continue;
    StripedFile::Part part{folders_[i].env->Open(name, mode, direct), static_cast<unsigned>(i), nullptr};
    const auto header = ReadHeader(*part.file);
    const auto contradicts = [&](const char* what) {
      throw CorruptError(name + ": " + what +
                         " that is in another folder of the store; restore all folders " + "from one copy");
    };
    if (found > 0 && !(any && header && header->IsOfOneFile(*any)))
      contradicts("does not belong to the part of this segment");
    if (!any) {
      any = header;
      // Each part takes a folder, so there are no more parts than folders.
      parts.resize(header ? std::min<std::size_t>(header->parts, kMostFolders) : 1);
    }
    const std::size_t number = header ? header->part : 0;
    if (number >= parts.size() || parts[number].file != nullptr) contradicts("is the same part as one");
    parts[number] = std::move(part);
    ++found;
  }
  if (found == 0) throw IoError(ENOENT, path, "open");
  if (found < parts.size()) {
    throw CorruptError(path + ": of its " + std::to_string(parts.size()) + " parts " +
                       std::to_string(parts.size() - found) + " are missing in the folders of the store; " +
                       "restore the folder that had them");
  }
  return std::make_unique<StripedFile>(path, std::move(parts), any ? any->stripe_bytes : 0);
}

bool StripedEnv::Exists(const std::string& path) {
  if (!IsStriped(path)) return first().Exists(path);
  for (std::size_t i = 0; i < folders_.size(); ++i) {
    if (folders_[i].env->Exists(PathIn(i, path))) return true;
  }
  return false;
}

std::vector<std::string> StripedEnv::List(const std::string& directory) {
  if (directory != folders_[0].path) return first().List(directory);
  const std::vector<std::string> own = first().List(directory);
  std::set<std::string> names(own.begin(), own.end());
  for (std::size_t i = 1; i < folders_.size(); ++i) {
    for (std::string& name : folders_[i].env->List(folders_[i].path)) {
      if (ParseSegmentName(name)) names.insert(std::move(name));
    }
  }
  return {names.begin(), names.end()};
}

void StripedEnv::Rename(const std::string& from, const std::string& to) {
  first().Rename(from, to);
  changed_[0] = true;
}

void StripedEnv::Remove(const std::string& path) {
  const std::size_t folders = IsStriped(path) ? folders_.size() : 1;
  for (std::size_t i = 0; i < folders; ++i) {
    folders_[i].env->Remove(PathIn(i, path));
    changed_[i] = true;
  }
}

void StripedEnv::SyncDirectory(const std::string& directory) {
  if (directory != folders_[0].path) return first().SyncDirectory(directory);
  AllAtOnce(folders_.size(), [this](std::size_t i) {
    if (!changed_[i].exchange(false)) return;
    try {
      folders_[i].env->SyncDirectory(folders_[i].path);
    } catch (...) {
      changed_[i] = true;
      throw;
    }
  });
}

std::unique_ptr<BatchReader> StripedEnv::NewBatchReader(ReadEngine engine, unsigned queue_depth, unsigned) {
  return std::make_unique<StripedReader>(first().NewBatchReader(engine, queue_depth, Devices()));
}

void StripedEnv::Close() {
  for (const StripeFolder& folder : folders_) folder.env->Close();
}

}  // namespace tierstore
