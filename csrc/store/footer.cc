#include "store/footer.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "common/crc32c.h"
#include "common/key.h"
#include "io/aligned_buffer.h"

namespace tierstore {
namespace {

constexpr char kTrailerMagic[9] = "TSTFOOTR";
constexpr unsigned kTableBits = 64 - kIdBits;
constexpr unsigned kAgeBits = 32;

// Widths has the bits of each part of a slot. A part takes as many bits as its largest value needs.
struct Widths {
  std::uint8_t void_flag = 0, id = 0, table = 0, age = 0;

  unsigned Slot() const { return unsigned{void_flag} + id + table + age; }
  std::uint64_t Array(std::uint64_t slots) const { return (slots * Slot() + 7) / 8; }
  bool ArePossible(bool relocated, bool has_voids) const {
    return void_flag == (has_voids ? 1 : 0) && id <= kIdBits && table <= kTableBits &&
           age <= (relocated ? kAgeBits : 0);
  }
};

// Returns how many segments ago the row was first written; 0 for a void.
std::uint32_t AgeOf(std::uint32_t epoch, std::uint32_t number) { return epoch == 0 ? 0 : number - epoch; }

Widths WidthsOf(const Footer& footer, std::uint32_t number) {
  std::uint64_t keys = 0;
  std::uint32_t ages = 0;
  for (const std::uint64_t key : footer.keys) keys |= key;
  for (const std::uint32_t epoch : footer.epochs) ages |= AgeOf(epoch, number);
  const auto width = [](std::uint64_t any) { return static_cast<std::uint8_t>(std::bit_width(any)); };
  return {static_cast<std::uint8_t>(footer.voids.empty() ? 0 : 1), width(KeyId(keys)), width(KeyTable(keys)),
          width(ages)};
}

// Reads or writes numbers of at most 48 bits, one behind the other. Behind the last number there must be 8
// more bytes, which the trailer has.
template <class Byte>
class BitCursor {
 public:
  explicit BitCursor(Byte* data) : data_(data) {}

  std::uint64_t Get(unsigned bits) {
    std::uint64_t word;
    std::memcpy(&word, data_ + at_ / 8, sizeof word);
    word >>= at_ % 8;
    at_ += bits;
    return word & ((std::uint64_t{1} << bits) - 1);
  }
  // The bits must be zero before.
  void Put(std::uint64_t value, unsigned bits) {
    std::uint64_t word;
    std::memcpy(&word, data_ + at_ / 8, sizeof word);
    word |= value << at_ % 8;
    std::memcpy(data_ + at_ / 8, &word, sizeof word);
    at_ += bits;
  }

 private:
  Byte* data_;
  std::uint64_t at_ = 0;  // in bits
};

void PutSlots(const Footer& footer, std::uint32_t number, const Widths& widths, std::byte* out) {
  BitCursor bits(out);
  auto next_void = footer.voids.begin();
  for (std::size_t slot = 0; slot < footer.keys.size(); ++slot) {
    if (widths.void_flag != 0) {
      const bool is_void = next_void != footer.voids.end() && *next_void == slot;
      next_void += is_void;
      bits.Put(is_void, 1);
    }
    bits.Put(KeyId(footer.keys[slot]), widths.id);
    bits.Put(KeyTable(footer.keys[slot]), widths.table);
    if (!footer.epochs.empty()) bits.Put(AgeOf(footer.epochs[slot], number), widths.age);
  }
}

Footer TakeSlots(const std::byte* data, std::uint32_t slots, const SegmentHeader& header,
                 const Widths& widths) {
  BitCursor bits(data);
  Footer footer;
  footer.keys.resize(slots);
  if (header.relocated) footer.epochs.resize(slots);
  for (std::uint32_t slot = 0; slot < slots; ++slot) {
    const bool is_void = bits.Get(widths.void_flag) != 0;
    if (is_void) footer.voids.push_back(slot);
    const std::uint64_t id = bits.Get(widths.id);
    footer.keys[slot] = MakeKey(static_cast<std::uint32_t>(bits.Get(widths.table)), id);
    const auto age = static_cast<std::uint32_t>(bits.Get(widths.age));
    if (header.relocated && !is_void) footer.epochs[slot] = header.number - age;
  }
  return footer;
}

template <class T>
void AppendArray(Encoder& out, const std::vector<T>& values) {
  out.Raw(values.data(), values.size() * sizeof(T));
}

template <class T>
std::vector<T> TakeArray(Decoder& in, std::size_t n) {
  std::vector<T> values(n);
  const std::byte* data = in.Take(n * sizeof(T));
  if (n > 0) std::memcpy(values.data(), data, n * sizeof(T));
  return values;
}

Footer TakeArrays(Decoder in, std::uint32_t slots, std::uint32_t voids, bool relocated) {
  Footer footer;
  footer.keys = TakeArray<std::uint64_t>(in, slots);
  if (relocated) footer.epochs = TakeArray<std::uint32_t>(in, slots);
  footer.voids = TakeArray<std::uint32_t>(in, voids);
  return footer;
}

std::uint64_t ArraysBytesOfVersion2(std::uint64_t slots, std::uint64_t voids, bool relocated) {
  return slots * (relocated ? 12 : 8) + voids * 4;
}

std::uint64_t WithTrailer(std::uint64_t array_bytes) { return RoundToBlock(array_bytes + kTrailerBytes); }

struct Trailer {
  std::uint32_t version, number, flags, slots, voids, array_crc;
  std::uint64_t offset;
  Widths widths;

  std::uint64_t ArrayBytes() const {
    return version == 2 ? ArraysBytesOfVersion2(slots, voids, flags == kRelocatedFlag) : widths.Array(slots);
  }
  void AppendTo(Encoder& out) const;
  // Returns nothing when the bytes are not the trailer of this segment.
  static std::optional<Trailer> Decode(const std::byte* data, const SegmentHeader& header);
};

void Trailer::AppendTo(Encoder& out) const {
  const std::size_t begin = out.bytes().size();
  out.Raw(kTrailerMagic, 8).Put(version).Put(number).Put(flags).Put(slots).Put(voids).Put(array_crc);
  out.Put(offset).Put(widths.void_flag).Put(widths.id).Put(widths.table).Put(widths.age);
  out.PadTo(begin + kTrailerBytes - 4);
  out.Put(Crc32c(out.bytes().data() + begin, kTrailerBytes - 4));
}

std::optional<Trailer> Trailer::Decode(const std::byte* data, const SegmentHeader& header) {
  Decoder in({data, kTrailerBytes}, "");
  if (std::memcmp(in.Take(8), kTrailerMagic, 8) != 0) return std::nullopt;
  Trailer trailer{};
  for (std::uint32_t* const field : {&trailer.version, &trailer.number, &trailer.flags, &trailer.slots,
                                     &trailer.voids, &trailer.array_crc})
    *field = in.Get<std::uint32_t>();
  trailer.offset = in.Get<std::uint64_t>();
  Widths& widths = trailer.widths;
  for (std::uint8_t* const width : {&widths.void_flag, &widths.id, &widths.table, &widths.age})
    *width = in.Get<std::uint8_t>();
  std::uint32_t crc;
  std::memcpy(&crc, data + kTrailerBytes - 4, sizeof crc);
  if (Crc32c(data, kTrailerBytes - 4) != crc || trailer.number != header.number) return std::nullopt;
  if (trailer.version < kOldestFooterVersion || trailer.version > kFooterVersion) return std::nullopt;
  if (trailer.flags != (header.relocated ? kRelocatedFlag : 0u)) return std::nullopt;
  if (trailer.slots > kMaxSlots || trailer.voids > trailer.slots) return std::nullopt;
  if (trailer.version > 2 && !widths.ArePossible(header.relocated, trailer.voids > 0)) return std::nullopt;
  return trailer;
}

}  // namespace

std::uint64_t Footer::EncodedBytes(const SegmentHeader& header) const {
  return WithTrailer(WidthsOf(*this, header.number).Array(keys.size()));
}

unsigned Footer::MostBits(bool relocated) { return 1 + 64 + (relocated ? kAgeBits : 0); }

std::uint64_t Footer::MostBytes(std::uint64_t slots, bool relocated) {
  return WithTrailer((slots * MostBits(relocated) + 7) / 8);
}

Bytes Footer::Encode(const SegmentHeader& header, std::uint32_t version) const {
  const auto slots = static_cast<std::uint32_t>(keys.size());
  Trailer trailer{version,
                  header.number,
                  header.relocated ? kRelocatedFlag : 0u,
                  slots,
                  static_cast<std::uint32_t>(voids.size()),
                  0,
                  Geometry::For(header.row_bytes).EndOffset(slots),
                  {}};
  Encoder out;
  if (version == 2) {
    AppendArray(out, keys);
    AppendArray(out, epochs);
    AppendArray(out, voids);
  } else {
    trailer.widths = WidthsOf(*this, header.number);
  }
  const std::uint64_t bytes = WithTrailer(trailer.ArrayBytes());
  out.PadTo(bytes);
  if (version != 2) PutSlots(*this, header.number, trailer.widths, out.bytes().data());
  out.PadTo(bytes - kTrailerBytes);
  trailer.array_crc = Crc32c(out.bytes().data(), trailer.ArrayBytes());
  trailer.AppendTo(out);
  return std::move(out.bytes());
}

std::optional<Footer> Footer::Load(File& file, const SegmentHeader& header, std::uint32_t* version) try {
  const std::uint64_t size = file.Size();
  if (size % kBlockBytes != 0 || size < kSegmentHeaderBytes + kBlockBytes) return std::nullopt;
  AlignedBuffer block(kBlockBytes);
  if (file.Read(size - kBlockBytes, block.data(), kBlockBytes) != kBlockBytes) return std::nullopt;
  const auto trailer = Trailer::Decode(block.data() + kBlockBytes - kTrailerBytes, header);
  if (!trailer || trailer->offset != Geometry::For(header.row_bytes).EndOffset(trailer->slots) ||
      trailer->offset + WithTrailer(trailer->ArrayBytes()) != size)
    return std::nullopt;

  AlignedBuffer array(size - trailer->offset);
  if (file.Read(trailer->offset, array.data(), array.size()) != array.size()) return std::nullopt;
  if (Crc32c(array.data(), trailer->ArrayBytes()) != trailer->array_crc) return std::nullopt;
  Footer footer = trailer->version == 2 ? TakeArrays(Decoder({array.data(), array.size()}, file.path()),
                                                     trailer->slots, trailer->voids, header.relocated)
                                        : TakeSlots(array.data(), trailer->slots, header, trailer->widths);
  if (footer.voids.size() != trailer->voids) return std::nullopt;
  if (!std::is_sorted(footer.voids.begin(), footer.voids.end())) return std::nullopt;
  if (!footer.voids.empty() && footer.voids.back() >= trailer->slots) return std::nullopt;
  if (version != nullptr) *version = trailer->version;
  return footer;
} catch (const CorruptError&) {
  return std::nullopt;
}

}  // namespace tierstore
