#include "store/striped_file.h"

#include <algorithm>
#include <cstring>

#include "common/crc32c.h"
#include "store/all_at_once.h"
#include "store/format.h"

namespace tierstore {
namespace {

constexpr char kMagic[9] = "TSTSTRIP";
constexpr std::uint64_t kData =
    2 * kBlockBytes;  // offset of the first stripe: behind part header and block 0

}  // namespace

Bytes PartHeader::Encode() const {
  Encoder out;
  out.bytes().reserve(kBlockBytes);
  out.Raw(kMagic, 8).Put(kFormatVersion).Put(parts).Put(part).Put(stripe_bytes).Put(stamp);
  out.Put(Crc32c(out.bytes().data(), out.bytes().size())).PadTo(kBlockBytes);
  return std::move(out.bytes());
}

std::optional<PartHeader> PartHeader::Decode(std::span<const std::byte> in, const std::string& path) {
  if (in.size() < 8 || std::memcmp(in.data(), kMagic, 8) != 0) return std::nullopt;
  Decoder decoder(in, path);
  decoder.Take(8);
  const auto version = decoder.Get<std::uint32_t>();
  PartHeader header;
  header.parts = decoder.Get<std::uint32_t>();
  header.part = decoder.Get<std::uint32_t>();
  header.stripe_bytes = decoder.Get<std::uint32_t>();
  header.stamp = decoder.Get<std::uint64_t>();
  const std::size_t end = decoder.at();
  if (decoder.Get<std::uint32_t>() != Crc32c(in.data(), end))
    decoder.Fail("the header of this part is damaged (checksum mismatch)");
  if (version != kFormatVersion) decoder.Fail(UnknownFormat(version));
  const bool aligned = header.stripe_bytes > 0 && header.stripe_bytes % kBlockBytes == 0;
  if (header.part >= header.parts || !aligned) decoder.Fail("the header of this part is impossible");
  return header;
}

StripedFile::StripedFile(std::string path, std::vector<Part> parts, std::uint32_t stripe_bytes)
    : path_(std::move(path)),
      parts_(std::move(parts)),
      stripe_bytes_(stripe_bytes),
      unsynced_(parts_.size()) {
  for (auto& unsynced : unsynced_) unsynced = true;  // the headers
}

StripedFile::Place StripedFile::At(std::uint64_t offset) const {
  if (stripe_bytes_ == 0) return {0, offset, ~std::uint64_t{0} - offset};
  if (offset < kBlockBytes) return {0, kBlockBytes + offset, kBlockBytes - offset};
  const std::uint64_t stripe = (offset - kBlockBytes) / stripe_bytes_,
                      within = (offset - kBlockBytes) % stripe_bytes_;
  return {stripe % parts_.size(), kData + stripe / parts_.size() * stripe_bytes_ + within,
          stripe_bytes_ - within};
}

std::size_t StripedFile::Read(std::uint64_t offset, void* data, std::size_t size) {
  std::size_t done = 0;
  while (done < size) {
    const Place place = At(offset + done);
    const std::size_t want = std::min<std::uint64_t>(size - done, place.left);
    const std::size_t got =
        parts_[place.part].file->Read(place.offset, static_cast<std::byte*>(data) + done, want);
    done += got;
    if (got < want) break;
  }
  return done;
}

void StripedFile::Write(std::uint64_t offset, const void* data, std::size_t size) {
  for (std::size_t done = 0; done < size;) {
    const Place place = At(offset + done);
    const std::size_t n = std::min<std::uint64_t>(size - done, place.left);
    const Part& part = parts_[place.part];
    unsynced_[place.part] = true;
    part.file->Write(place.offset, static_cast<const std::byte*>(data) + done, n);
    if (part.promise != nullptr) part.promise->NoteWritten(n);
    done += n;
  }
}

void StripedFile::Sync() {
  AllAtOnce(parts_.size(), [this](std::size_t part) {
    if (!unsynced_[part].exchange(false)) return;
    try {
      parts_[part].file->Sync();
    } catch (...) {
      unsynced_[part] = true;
      throw;
    }
  });
}

// Returns the size of the part's file, when the whole file has `size` bytes.
std::uint64_t StripedFile::SizeOfPart(std::size_t part, std::uint64_t size) const {
  if (stripe_bytes_ == 0) return size;
  if (size <= kBlockBytes) return kBlockBytes + (part == 0 ? size : 0);
  const std::uint64_t stripes = (size - kBlockBytes) / stripe_bytes_,
                      rest = (size - kBlockBytes) % stripe_bytes_;
  const std::uint64_t own = stripes / parts_.size() + (part < stripes % parts_.size() ? 1 : 0);
  const std::uint64_t bytes = own * stripe_bytes_ + (part == stripes % parts_.size() ? rest : 0);
  return bytes == 0 && part > 0 ? kBlockBytes : kData + bytes;
}

void StripedFile::Truncate(std::uint64_t size) {
  for (std::size_t part = 0; part < parts_.size(); ++part) {
    unsynced_[part] = true;
    parts_[part].file->Truncate(SizeOfPart(part, size));
  }
}

std::uint64_t StripedFile::Size() {
  if (stripe_bytes_ == 0) return parts_[0].file->Size();
  std::uint64_t size = ~std::uint64_t{0};
  for (std::size_t part = 0; part < parts_.size(); ++part) {
    const std::uint64_t there = parts_[part].file->Size();
    if (part == 0 && there < kData) return there < kBlockBytes ? 0 : there - kBlockBytes;
    const std::uint64_t bytes = there < kData ? 0 : there - kData;
    const std::uint64_t stripe = bytes / stripe_bytes_ * parts_.size() + part;
    size = std::min(size, kBlockBytes + stripe * stripe_bytes_ + bytes % stripe_bytes_);
  }
  return size;
}

bool StripedFile::IsDirect() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.file->IsDirect(); });
}

}  // namespace tierstore
