// Encodes the store's metadata in little-endian order, and decodes it without reading past the end.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "store/errors.h"

namespace tierstore {

static_assert(std::endian::native == std::endian::little,
              "records and metadata are copied as they lie in memory");

using Bytes = std::vector<std::byte>;

class Encoder {
 public:
  template <class T>
  Encoder& Put(T value) {
    static_assert(std::is_integral_v<T>);
    return Raw(&value, sizeof value);
  }
  Encoder& Raw(const void* data, std::size_t size) {
    const std::size_t at = out_.size();
    out_.resize(at + size);
    if (size > 0) std::memcpy(out_.data() + at, data, size);
    return *this;
  }
  Encoder& PadTo(std::size_t size) {
    out_.resize(size);
    return *this;
  }
  // Puts the length, then the bytes.
  Encoder& String(const std::string& text) {
    return Put(static_cast<std::uint32_t>(text.size())).Raw(text.data(), text.size());
  }
  Bytes& bytes() { return out_; }

 private:
  Bytes out_;
};

class Decoder {
 public:
  // `what` begins the message of errors, as in "native/MANIFEST".
  Decoder(std::span<const std::byte> in, std::string what) : in_(in), what_(std::move(what)) {}

  template <class T>
  T Get() {
    static_assert(std::is_integral_v<T>);
    T value;
    std::memcpy(&value, Take(sizeof value), sizeof value);
    return value;
  }
  const std::byte* Take(std::size_t size) {
    if (size > in_.size() - at_) Fail("ends within its data");
    const std::byte* data = in_.data() + at_;
    at_ += size;
    return data;
  }
  std::string String() {
    const auto size = Get<std::uint32_t>();
    const std::byte* data = Take(size);
    return {reinterpret_cast<const char*>(data), size};
  }
  // Gets a number of elements of at least `element_bytes` each. Fails when the input is too short for them,
  // so that no allocation exceeds the input.
  std::uint32_t Count(std::size_t element_bytes) {
    const auto count = Get<std::uint32_t>();
    if (count > (in_.size() - at_) / element_bytes) Fail("ends within its data");
    return count;
  }
  std::size_t at() const { return at_; }
  bool AtEnd() const { return at_ == in_.size(); }
  [[noreturn]] void Fail(const std::string& why) const {
    throw CorruptError(what_ + ": " + why + " (at offset " + std::to_string(at_) + ")");
  }

 private:
  std::span<const std::byte> in_;
  std::string what_;
  std::size_t at_ = 0;
};

}  // namespace tierstore
