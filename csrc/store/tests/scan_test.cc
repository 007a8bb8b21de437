// Scans beside a writer, commits and compaction, from two threads, until the store closes; and an index that
// several threads restore. Meant to run under sanitizers (make sanitize).
//
//   scan_test DIRECTORY [STEPS] [SEED]
#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <random>
#include <thread>

#include "common/key.h"
#include "common/tests/check.h"
#include "io/memory_env.h"
#include "store/errors.h"
#include "store/store.h"

using namespace tierstore;

namespace {

constexpr std::uint32_t kTables = 2, kRowBytes[] = {16, 272};
constexpr std::uint64_t kIds = 4000;

using Versions = std::vector<std::uint64_t>;  // of the rows of both tables, one table after the other

StoreConfig Config() {
  StoreConfig config;
  config.cap_bytes = 4 << 20;  // so little that writes wait for compaction
  config.segment_bytes = 48 << 10;
  config.write_buffer_bytes = 256 << 10;
  config.limits.chunk_bytes = 16 << 10;
  return config;
}

void Write(Store& store, std::uint32_t table, const std::vector<std::uint64_t>& ids, std::uint64_t version) {
  const std::uint32_t row_bytes = kRowBytes[table];
  std::vector<std::uint64_t> keys;
  std::vector<std::byte> rows(ids.size() * row_bytes, static_cast<std::byte>(version));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    keys.push_back(MakeKey(table, ids[i]));
    std::memcpy(&rows[i * row_bytes], &version, sizeof version);
  }
  store.Write(keys, rows.data(), row_bytes);
}

// Adds what a scan gives: each row once, and whole.
void Add(const ScanBatch& batch, Versions& versions) {
  for (std::size_t i = 0; i < batch.keys.size(); ++i) {
    const std::uint32_t table = KeyTable(batch.keys[i]);
    CHECK(table < kTables && batch.row_bytes == kRowBytes[table]);
    std::uint64_t& version = versions[table * kIds + KeyId(batch.keys[i])];
    CHECK(version == 0);
    const std::uint8_t* const row = &batch.rows[i * batch.row_bytes];
    std::memcpy(&version, row, sizeof version);
    CHECK(std::all_of(row + sizeof version, row + batch.row_bytes,
                      [&](std::uint8_t byte) { return byte == static_cast<std::uint8_t>(version); }));
  }
}

// `done` and `begun`: the versions that all rows have at least, and at most.
void ScanUntilClosed(Store& store, const std::atomic<std::uint64_t>& done,
                     const std::atomic<std::uint64_t>& begun) try {
  while (true) {
    const std::uint64_t least = done;
    Versions versions(kTables * kIds);
    const std::unique_ptr<Scan> scan = store.BeginScan({0, 1});
    while (true) {
      const std::vector<ScanBatch> batches = store.Next(*scan);
      if (batches.empty()) break;
      for (const ScanBatch& batch : batches) Add(batch, versions);
    }
    const auto [low, high] = std::minmax_element(versions.begin(), versions.end());
    CHECK(*low >= least && *high <= begun);
  }
} catch (const ClosedError&) {
}

void ScanMeanwhile(Env& env, const std::string& directory, int steps, std::uint64_t seed) {
  Store store(env, directory, Config(), {});
  std::mt19937_64 random(seed);
  std::vector<std::uint64_t> ids(kIds);
  std::iota(ids.begin(), ids.end(), 0);
  std::atomic<std::uint64_t> done{1}, begun{1};
  for (std::uint32_t table = 0; table < kTables; ++table) Write(store, table, ids, 1);
  std::thread scans[] = {std::thread([&] { ScanUntilClosed(store, done, begun); }),
                         std::thread([&] { ScanUntilClosed(store, done, begun); })};
  for (int step = 0; step < steps; ++step) {
    ++begun;
    std::shuffle(ids.begin(), ids.end(), random);
    for (std::size_t at = 0; at < ids.size(); at += 400) {
      const std::vector<std::uint64_t> some(ids.begin() + static_cast<std::ptrdiff_t>(at),
                                            ids.begin() + static_cast<std::ptrdiff_t>(at + 400));
      for (std::uint32_t table = 0; table < kTables; ++table) Write(store, table, some, begun);
      store.Commit("", "");
    }
    done = begun.load();
    if (step % 10 == 9) store.Compact();
  }
  CHECK(store.Stats().relocated_rows > 0);
  store.Close();
  for (std::thread& scan : scans) scan.join();
}

// So many rows that several threads restore the index: all are there, once, and the index goes on.
void ReopenManyRows() {
  constexpr std::uint64_t kMany = 300'000;
  MemoryEnv memory;
  StoreConfig config = Config();
  config.cap_bytes = 1 << 30;
  config.snapshot_min_rows = 1;
  std::vector<std::uint64_t> ids(kMany);
  std::iota(ids.begin(), ids.end(), 0);
  {
    Store store(memory, "disk", config, {});
    Write(store, 0, ids, 1);
    store.Commit("", "");
  }
  Store store(memory, "disk", config, {});
  CHECK(store.Stats().rebuilt_rows == 0 && store.Stats().rows == kMany && store.CountsAreExact());
  std::vector<bool> seen(kMany);
  const std::unique_ptr<Scan> scan = store.BeginScan({0});
  for (std::vector<ScanBatch> batches = store.Next(*scan); !batches.empty(); batches = store.Next(*scan)) {
    for (const ScanBatch& batch : batches) {
      for (const std::uint64_t key : batch.keys) {
        CHECK(!seen[KeyId(key)]);
        seen[KeyId(key)] = true;
      }
    }
  }
  CHECK(std::count(seen.begin(), seen.end(), true) == static_cast<std::int64_t>(kMany));
  for (std::uint64_t& id : ids) id += kMany / 2;
  Write(store, 0, ids, 2);
  CHECK(store.Stats().rows == kMany + kMany / 2);
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc > 1);
  const std::filesystem::path directory = std::filesystem::path(argv[1]) / "scans";
  const int steps = argc > 2 ? std::atoi(argv[2]) : 30;
  const std::uint64_t first = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
  ReopenManyRows();
  for (std::uint64_t seed = first; seed < first + 3; ++seed) {
    MemoryEnv memory;
    ScanMeanwhile(memory, "disk", steps, seed);
    std::filesystem::remove_all(directory);
    std::filesystem::create_directories(directory);
    ScanMeanwhile(PosixEnv(), directory.string(), steps, seed);
  }
  std::puts("ok");
}
