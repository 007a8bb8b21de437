#include "kernels/init.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/float_mode.h"
#include "common/key.h"
#include "kernels/normal.h"
#include "kernels/philox.h"
#include "kernels/weights.h"

namespace tierstore {
namespace {

// Draws the random bits of kColumns columns from `column` on, a multiple of 4.
template <int kColumns>
TIERSTORE_INLINE void RandomColumns(std::uint64_t id, std::int64_t column, std::uint64_t seed,
                                    std::uint32_t (&bits)[kColumns]) {
  constexpr int kCounters = kColumns / 4;
  std::uint32_t words[4][kCounters];
  Philox<kCounters>(static_cast<std::uint32_t>(id), static_cast<std::uint32_t>(id >> 32),
                    static_cast<std::uint32_t>(column / 4), seed, words);
  for (int i = 0; i < kCounters; ++i) {
    for (int j = 0; j < 4; ++j) bits[4 * i + j] = words[j][i];
  }
}

template <int kColumns>
TIERSTORE_INLINE void Uniform(const std::uint32_t (&bits)[kColumns], float a, float b,
                              float (&out)[kColumns]) {
  const float span = b - a;
  const float below = a < b ? std::nextafter(b, a) : a;
  for (int i = 0; i < kColumns; ++i) {
    const float value = a + static_cast<float>(static_cast<std::int32_t>(bits[i] >> 8)) * 0x1p-24f * span;
    out[i] = value < below ? value : below;
  }
}

template <int kColumns>
TIERSTORE_INLINE void Normal(const std::uint32_t (&bits)[kColumns], double mean, double std,
                             float (&out)[kColumns]) {
  double numbers[kColumns];
  NormalNumbers(bits, numbers);
  for (int i = 0; i < kColumns; ++i) out[i] = static_cast<float>(mean + std * numbers[i]);
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
    WithWeights(args.rows.weights, [&](auto type) __attribute__((always_inline)) {
      for (std::int64_t i = begin; i < end; ++i)
        Fill<W, decltype(type)>(args, args.keys[i], args.rows.At(args.slots != nullptr ? args.slots[i] : i));
    });
  }

  template <int W, typename Weights>
  TIERSTORE_INLINE static void Fill(const Args& args, std::uint64_t key, std::uint8_t* row) {
    const std::int64_t begin = StateBegin(Weights::kType, args.dim);
    if constexpr (Weights::kType == WeightType::kFloat32) {
      FillWeights(args, key, reinterpret_cast<float*>(row));
    } else {
      float* const values = Scratch(args.dim);
      FillWeights(args, key, values);
      Weights::template Narrow<W, false>(values, args.dim, 0, {}, row);
      const std::int64_t end = Weights::kBytes * args.dim;
      std::memset(row + end, 0, static_cast<std::size_t>(begin - end));
    }
    float* const state = reinterpret_cast<float*>(row + begin);
    std::fill(state, state + args.state_floats, args.state_value);
    std::fill(state + args.state_floats, reinterpret_cast<float*>(row + args.rows.row_bytes), 0.0f);
  }

  TIERSTORE_INLINE static void FillWeights(const Args& args, std::uint64_t key, float* row) {
    const std::uint32_t table = KeyTable(key);
    if (args.tables.kinds[table] == InitKind::kConstant) {
      std::fill(row, row + args.dim, args.tables.first[table]);
      return;
    }
    const std::uint64_t id = KeyId(key);
    const std::int64_t first = args.tables.columns != nullptr ? args.tables.columns[table] : 0;
    std::int64_t c = 0;
    if (first % 4 != 0) {  // a counter gives four columns
      const int skip = static_cast<int>(first % 4);
      FillColumns<16>(args.tables, table, id, first - skip, skip, args.dim, row);
      c = 16 - skip;
    }
    for (; args.dim - c > 32; c += 64)
      FillColumns<64>(args.tables, table, id, first + c, 0, args.dim - c, row + c);
    for (; args.dim - c > 16; c += 32)
      FillColumns<32>(args.tables, table, id, first + c, 0, args.dim - c, row + c);
    for (; c < args.dim; c += 16)
      FillColumns<16>(args.tables, table, id, first + c, 0, args.dim - c, row + c);
  }

  // Writes at most `limit` of the kColumns columns from `column` on, and not the first `skip` columns.
  template <int kColumns>
  TIERSTORE_INLINE static void FillColumns(const TableInit& tables, std::uint32_t table, std::uint64_t id,
                                           std::int64_t column, int skip, std::int64_t limit, float* out) {
    std::uint32_t bits[kColumns];
    RandomColumns(id, column, tables.seeds[table], bits);
    float values[kColumns];
    if (tables.kinds[table] == InitKind::kUniform) {
      Uniform(bits, tables.first[table], tables.second[table], values);
    } else {
      Normal(bits, tables.first[table], tables.second[table], values);
    }
    if (skip == 0 && limit >= kColumns) {
      std::memcpy(out, values, sizeof values);  // of a size that the compiler knows
    } else {
      std::memcpy(out, values + skip, std::min<std::int64_t>(kColumns - skip, limit) * sizeof(float));
    }
  }
};

}  // namespace

void InitRows(Rows rows, const std::int32_t* slots, const std::uint64_t* keys, std::int64_t n,
              std::int64_t dim, std::int64_t state_floats, float state_value, const TableInit& tables) {
  const std::int64_t grain = std::max<std::int64_t>(1, 4096 / dim);
  // A row's values depend on nothing but its key, whichever thread computes them first.
  const ScopedFloatMode mode(DefaultFloatMode());
  RunKernel<InitKernel>({rows, slots, keys, dim, state_floats, state_value, tables}, 0, n, grain);
}

}  // namespace tierstore
