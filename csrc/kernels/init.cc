#include "kernels/init.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/key.h"
#include "kernels/normal.h"
#include "kernels/philox.h"
#include "kernels/vec.h"

namespace tierstore {
namespace {

constexpr int kCounters = 16;
constexpr int kColumns = 4 * kCounters;

TIERSTORE_INLINE void RandomColumns(std::uint64_t id, std::int64_t column, std::uint64_t seed,
                                    std::uint32_t (&bits)[kColumns]) {
  std::uint32_t words[4][kCounters];
  Philox<kCounters>(static_cast<std::uint32_t>(id), static_cast<std::uint32_t>(id >> 32),
                    static_cast<std::uint32_t>(column / 4), seed, words);
  for (int i = 0; i < kCounters; ++i) {
    for (int j = 0; j < 4; ++j) bits[4 * i + j] = words[j][i];
  }
}

TIERSTORE_INLINE void FillUniform(const std::uint32_t (&bits)[kColumns], float a, float b, int columns,
                                  float* out) {
  const float span = b - a;
  const float below = a < b ? std::nextafter(b, a) : a;
  float values[kColumns];
  for (int i = 0; i < kColumns; ++i) {
    const float value = a + static_cast<float>(static_cast<std::int32_t>(bits[i] >> 8)) * 0x1p-24f * span;
    values[i] = value < below ? value : below;
  }
  std::memcpy(out, values, columns * sizeof(float));
}

TIERSTORE_INLINE void FillNormal(const std::uint32_t (&bits)[kColumns], double mean, double std, int columns,
                                 float* out) {
  for (int i = 0; i < columns; ++i) {
    const double z = NormalQuantile((static_cast<double>(bits[i]) + 0.5) * 0x1p-32);
    out[i] = static_cast<float>(mean + std * z);
  }
}

struct InitKernel {
  struct Args {
    Rows rows;
    const std::int32_t* slots;
    const std::uint64_t* keys;
    std::int64_t dim;
    std::int64_t state_floats;
    float state_value;
    TableInit tables;
  };

  template <int W>
  TIERSTORE_INLINE static void Run(const Args& args, std::int64_t begin, std::int64_t end) {
    const std::int64_t floats = args.rows.row_bytes / 4;
    for (std::int64_t i = begin; i < end; ++i) {
      float* row = args.slots != nullptr ? args.rows.At(args.slots[i])
                                         : reinterpret_cast<float*>(args.rows.base + i * args.rows.row_bytes);
      FillWeights(args, args.keys[i], row);
      std::fill(row + args.dim, row + args.dim + args.state_floats, args.state_value);
      std::fill(row + args.dim + args.state_floats, row + floats, 0.0f);
    }
  }

  TIERSTORE_INLINE static void FillWeights(const Args& args, std::uint64_t key, float* row) {
    const std::uint32_t table = KeyTable(key);
    const float a = args.tables.a[table], b = args.tables.b[table];
    if (args.tables.kinds[table] == InitKind::kConstant) {
      std::fill(row, row + args.dim, a);
      return;
    }
    for (std::int64_t c = 0; c < args.dim; c += kColumns) {
      std::uint32_t bits[kColumns];
      RandomColumns(KeyId(key), c, args.tables.seeds[table], bits);
      const int columns = static_cast<int>(std::min<std::int64_t>(kColumns, args.dim - c));
      if (args.tables.kinds[table] == InitKind::kUniform) {
        FillUniform(bits, a, b, columns, row + c);
      } else {
        FillNormal(bits, a, b, columns, row + c);
      }
    }
  }
};

}  // namespace

void InitRows(Rows rows, const std::int32_t* slots, const std::uint64_t* keys, std::int64_t n,
              std::int64_t dim, std::int64_t state_floats, float state_value, const TableInit& tables) {
  const std::int64_t grain = std::max<std::int64_t>(1, 4096 / dim);
  RunKernel<InitKernel>({rows, slots, keys, dim, state_floats, state_value, tables}, 0, n, grain);
}

}  // namespace tierstore
