#include "common/key.h"

#include <random>

namespace tierstore {
namespace {

HashSecret DrawSecret() {
  std::random_device random;
  const auto draw = [&] { return std::uint64_t{random()} << 32 | random(); };
  return {draw(), draw() | 1};
}

}  // namespace

const HashSecret kHashSecret = DrawSecret();

}  // namespace tierstore
