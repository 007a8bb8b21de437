// Random workloads on a Store against a model, on the file system in memory and on the real one, with both
// ways of reading; crash images on the way; Close from another thread. Meant to run under sanitizers (make
// sanitize).
//
//   store_test DIRECTORY [STEPS] [SEED]
#include "store/store.h"

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <map>
#include <random>
#include <thread>

#include "common/key.h"
#include "common/tests/check.h"
#include "io/errors.h"
#include "io/fault_env.h"
#include "io/memory_env.h"
#include "store/errors.h"

using namespace tierstore;

namespace {

using Model = std::map<std::uint64_t, std::uint64_t>;  // version by key

constexpr std::uint32_t kRowBytes[] = {16, 272, 2080};
constexpr std::uint64_t kIds[] = {3000, 600, 60};

void FillRow(std::uint64_t key, std::uint64_t version, std::uint32_t row_bytes, std::byte* row) {
  for (std::uint32_t at = 0; at < row_bytes; at += 8) {
    const std::uint64_t word = at == 0 ? version : MixKey(key + version * 1000003 + at);
    std::memcpy(row + at, &word, 8);
  }
}

StoreConfig Config(ReadEngine engine) {
  StoreConfig config;
  config.cap_bytes = 8 << 20;
  config.segment_bytes = 48 << 10;
  config.read_engine = engine;
  config.queue_depth = 16;
  config.snapshot_min_rows = 1;
  config.write_buffer_bytes = 256 << 10;
  return config;
}

std::unique_ptr<Store> OpenStore(Env& env, const std::string& directory, ReadEngine engine) {
  return std::make_unique<Store>(env, directory, Config(engine),
                                 std::vector<std::pair<std::uint32_t, std::uint32_t>>{});
}

const std::vector<std::pair<std::uint32_t, std::uint32_t>> kNoTables;

// Up to the share 1 / `parts` of a table's rows.
void WriteRows(Store& store, std::mt19937_64& random, std::uint64_t version, std::uint64_t parts,
               Model& model) {
  const std::uint32_t table = static_cast<std::uint32_t>(random() % 3);
  std::map<std::uint64_t, bool> chosen;
  for (std::uint64_t n = 1 + random() % (kIds[table] / parts); n > 0; --n)
    chosen[MakeKey(table, random() % kIds[table])];
  std::vector<std::uint64_t> keys;
  for (const auto& [key, unused] : chosen) keys.push_back(key);
  std::vector<std::byte> rows(keys.size() * kRowBytes[table]);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    FillRow(keys[i], version, kRowBytes[table], &rows[i * kRowBytes[table]]);
    model[keys[i]] = version;
  }
  store.Write(keys, rows.data(), kRowBytes[table]);
}

void WriteSome(Store& store, std::mt19937_64& random, std::uint64_t version, Model& model) {
  WriteRows(store, random, version, 2, model);
}

// Versions of the rows of a table that are stored, by key; each row must be whole.
Model ReadTable(Store& store, std::uint32_t table) {
  const std::uint32_t row_bytes = kRowBytes[table];
  std::vector<std::uint64_t> keys(kIds[table]);
  for (std::uint64_t id = 0; id < kIds[table]; ++id) keys[id] = MakeKey(table, id);
  std::vector<std::byte> rows(keys.size() * row_bytes), expected(row_bytes);
  const auto found = std::make_unique<bool[]>(keys.size());
  store.Read(keys, {rows.data(), row_bytes}, found.get());
  Model versions;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!found[i]) continue;
    std::uint64_t version;
    std::memcpy(&version, &rows[i * row_bytes], sizeof(version));
    FillRow(keys[i], version, row_bytes, expected.data());
    CHECK(std::memcmp(expected.data(), &rows[i * row_bytes], row_bytes) == 0);
    versions[keys[i]] = version;
  }
  return versions;
}

void CheckAll(Store& store, const Model& model) {
  CHECK(store.Stats().rows == model.size());
  CHECK(store.CountsAreExact());
  Model stored;
  for (std::uint32_t table = 0; table < 3; ++table) stored.merge(ReadTable(store, table));
  CHECK(stored == model);
}

// Places tell which rows are stored; two rows share one only where an ordinal has got a larger segment. Reads
// in their order, into slots against it, give the same rows, and leave other slots as they are.
void CheckPlaces(Store& store, std::uint32_t table, const Model& model) {
  constexpr std::byte kOther{0xee};
  const std::uint32_t row_bytes = kRowBytes[table];
  std::vector<std::uint64_t> keys(kIds[table]), places(kIds[table]);
  for (std::uint64_t id = 0; id < kIds[table]; ++id) keys[id] = MakeKey(table, id);
  store.Places(keys, places.data());
  std::vector<std::pair<std::uint64_t, std::uint64_t>> stored;  // place and key
  for (std::size_t i = 0; i < keys.size(); ++i) {
    CHECK((places[i] != Reader::kNowhere) == model.contains(keys[i]));
    if (places[i] != Reader::kNowhere) stored.emplace_back(places[i], keys[i]);
  }
  std::sort(stored.begin(), stored.end());
  const std::size_t n = stored.size();
  std::vector<std::int32_t> slots(n);
  keys.resize(n);
  for (std::size_t i = 0; i < n; ++i) {
    keys[i] = stored[i].second;
    slots[i] = static_cast<std::int32_t>(2 * (n - i) - 1);
  }
  std::vector<std::byte> rows(2 * n * row_bytes, kOther), expected(row_bytes);
  const auto found = std::make_unique<bool[]>(n);
  store.Read(keys, {rows.data(), row_bytes, slots.data()}, found.get());
  for (std::size_t i = 0; i < n; ++i) {
    CHECK(found[i]);
    FillRow(keys[i], model.at(keys[i]), row_bytes, expected.data());
    const std::byte* const row = &rows[static_cast<std::size_t>(slots[i]) * row_bytes];
    CHECK(std::memcmp(expected.data(), row, row_bytes) == 0);
    CHECK(std::all_of(row - row_bytes, row, [](std::byte byte) { return byte == kOther; }));
  }
}

void RunWorkload(Env& env, const std::string& directory, ReadEngine engine, int steps, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  auto store = OpenStore(env, directory, engine);
  Model now, committed;
  for (int step = 1; step <= steps; ++step) {
    const std::uint64_t action = random() % 100;
    if (action < 70) {
      WriteSome(*store, random, static_cast<std::uint64_t>(step), now);
    } else if (action < 85) {
      CheckAll(*store, now);
      CheckPlaces(*store, static_cast<std::uint32_t>(random() % 3), now);
    } else if (action < 92) {
      store->Commit("step " + std::to_string(step), "");
      committed = now;
      if (auto* memory = dynamic_cast<MemoryEnv*>(&env)) {
        auto image = memory->AfterCrash(memory->operations(), MemoryEnv::Unsynced::kRandom, random());
        CheckAll(*OpenStore(*image, directory, engine), committed);
      }
    } else if (action < 97) {
      store->Compact();
    } else {
      store.reset();
      store = OpenStore(env, directory, engine);
      now = committed;
    }
  }
  CheckAll(*store, now);
}

// Rows that were read before have places, also beside other calls.
void CheckSomewhere(Store& store, const Model& seen) {
  std::vector<std::uint64_t> keys, places(seen.size());
  for (const auto& [key, unused] : seen) keys.push_back(key);
  store.Places(keys, places.data());
  for (const std::uint64_t place : places) CHECK(place != Reader::kNowhere);
}

// Reads from three other threads, so that all lanes have work, beside writes, commits and compaction: rows
// are whole, and never older than what was read before.
void ReadMeanwhile(Env& env, const std::string& directory, ReadEngine engine, int steps, std::uint64_t seed) {
  Store store(env, directory, Config(engine), {});
  std::atomic<bool> done{false};
  const auto read = [&](std::uint64_t reader) {
    Model seen[3];  // by table
    std::mt19937_64 random(seed + reader);
    while (!done) {
      const auto table = static_cast<std::uint32_t>(random() % 3);
      CheckSomewhere(store, seen[table]);
      Model now = ReadTable(store, table);
      for (const auto& [key, version] : seen[table]) {
        CHECK(now.contains(key));
        CHECK(now[key] >= version);
      }
      seen[table] = std::move(now);
    }
  };
  std::thread readers[] = {std::thread(read, 1), std::thread(read, 2), std::thread(read, 3)};
  std::mt19937_64 random(seed);
  Model model;
  for (int step = 1; step <= steps; ++step) {
    WriteSome(store, random, static_cast<std::uint64_t>(step), model);
    if (step % 9 == 0) store.Commit("", "");
    if (step % 40 == 0) store.Compact();
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
  CheckAll(store, model);
}

// Memory runs out within a commit, while the mutex is let go. What the commit then takes back it changes with
// the mutex held, as the compactor looks at it at once (only TSan can tell); and commits are refused until
// the store is opened anew, at the last one that succeeded.
void RunOutOfMemory(const char* kind, std::uint64_t seed) {
  MemoryEnv memory;
  FaultEnv env(memory);
  Model model, committed;
  StoreConfig config = Config(ReadEngine::kAuto);
  config.snapshot_min_rows = 1 << 30;  // a thread that saves the index would meet the failure
  const auto open = [&] { return std::make_unique<Store>(env, "disk", config, kNoTables); };
  {
    auto store = open();
    std::mt19937_64 random(seed);
    for (std::uint64_t version = 1; version < 8; ++version) {
      WriteSome(*store, random, 2 * version, model);
      env.Fail(kind, 1, ENOMEM, false);
      bool thrown = false;
      try {
        store->Commit("", "");
      } catch (const std::bad_alloc&) {
        thrown = true;
      }
      CHECK(thrown);
      env.Heal();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      CheckAll(*store, model);
      // What was not synced, or renamed, may be lost: nothing is promised before the store is opened anew.
      bool refused = false;
      try {
        store->Commit("", "");
      } catch (const IoError& error) {
        refused = std::string(error.what()).find("reopen the store") != std::string::npos;
      }
      CHECK(refused);
      store.reset();
      store = open();
      model = committed;
      CheckAll(*store, model);
      WriteSome(*store, random, 2 * version + 1, model);
      store->Commit("", "");
      committed = model;
    }
  }
  CheckAll(*OpenStore(memory, "disk", ReadEngine::kAuto), model);
}

// Rows of a chunk of `bytes`, and of a segment: commits fall on the ends of both, one short of them and one
// past.
void CommitAtEnds(std::uint32_t row_bytes, std::uint64_t off, ReadEngine engine) {
  MemoryEnv env;
  const Geometry geometry = Geometry::For(row_bytes);
  StoreConfig config = Config(engine);
  config.cap_bytes = 64 << 20;
  config.limits.chunk_bytes = std::max<std::size_t>(8192, geometry.frame_bytes);
  config.segment_bytes = kSegmentHeaderBytes + 2 * config.limits.chunk_bytes;
  const std::uint64_t chunk = config.limits.chunk_bytes / geometry.frame_bytes * geometry.records_per_frame;
  std::vector<std::byte> rows, read, expected(row_bytes);
  std::vector<std::uint64_t> keys;
  for (std::uint64_t id = 0; id < 3 * chunk + off - 1; ++id) keys.push_back(MakeKey(0, id));
  rows.resize(keys.size() * row_bytes);
  read.resize(rows.size());
  const auto found = std::make_unique<bool[]>(keys.size());
  for (std::uint64_t version = 1; version < 8; ++version) {
    const std::size_t n = std::min<std::size_t>(keys.size(), version % 3 * chunk + off - (off > 0));
    for (std::size_t i = 0; i < n; ++i) FillRow(keys[i], version, row_bytes, &rows[i * row_bytes]);
    Store store(env, "disk", config, {{0, row_bytes}});
    store.Write({keys.data(), n}, rows.data(), row_bytes);
    store.Commit("", "");
    store.Write({keys.data(), n / 2}, rows.data(), row_bytes);
    store.Commit("", "");
    auto image = env.AfterCrash(env.operations(), MemoryEnv::Unsynced::kLost, version);
    Store again(*image, "disk", config, {{0, row_bytes}});
    again.Read({keys.data(), n}, {read.data(), row_bytes}, found.get());
    CHECK(std::all_of(found.get(), found.get() + n, [](bool there) { return there; }));
    CHECK(std::memcmp(read.data(), rows.data(), n * row_bytes) == 0);
  }
}

// Commits of a few rows each while space is short, so that the last commit is written anew beside writes,
// with readers; what a crash leaves then is the last commit.
void StayWithinACap(std::uint64_t seed) {
  MemoryEnv env;
  StoreConfig config = Config(ReadEngine::kAuto);
  config.segment_bytes = 16 << 10;
  config.cap_bytes = 1300 << 10;
  config.limits.chunk_bytes = 8192;
  std::mt19937_64 random(seed);
  Model now, committed;
  std::uint64_t renewed = 0;
  for (int opened = 0; opened < 3; ++opened) {
    Store store(env, "disk", config, {});
    std::atomic<bool> done{false};
    std::thread reader([&] {
      while (!done) ReadTable(store, 1);
    });
    for (std::uint64_t version = 1; version < 200; ++version) {
      WriteRows(store, random, static_cast<std::uint64_t>(opened) * 1000 + version, 20, now);
      if (version % 5 != 0) continue;
      auto image = env.AfterCrash(env.operations(), MemoryEnv::Unsynced::kRandom, random());
      if (!committed.empty())
        CheckAll(*std::make_unique<Store>(*image, "disk", config, kNoTables), committed);
      store.Commit("", "");
      committed = now;
    }
    done = true;
    reader.join();
    CheckAll(store, now);
    store.Commit("", "");
    committed = now;
    renewed += store.Stats().renewed_commits;
  }
  CHECK(renewed > 0);
}

// Close while another thread works: its call ends, or throws ClosedError.
void CloseMeanwhile(Env& env, const std::string& directory, ReadEngine engine, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Store store(env, directory, Config(engine), {});
  std::thread worker([&] {
    std::mt19937_64 random_writes(seed);
    Model model;
    try {
      for (std::uint64_t version = 1;; ++version) {
        WriteSome(store, random_writes, version, model);
        if (version % 7 == 0) CheckAll(store, model);
        if (version % 5 == 0) store.Commit("", "");
      }
    } catch (const ClosedError&) {
    }
  });
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 30000));
  store.Close();
  worker.join();
}

// Close while a commit saves the index, which compaction waits for with rows in its hands: all three end.
void CloseBesideASnapshot(std::uint64_t seed) {
  MemoryEnv memory;
  FaultEnv env(memory);
  StoreConfig config = Config(ReadEngine::kAuto);
  config.segment_bytes = 16 << 10;
  std::mt19937_64 random(seed);
  Store store(env, "disk", config, {});
  env.SlowDown(200e-6);
  std::thread worker([&] {
    std::mt19937_64 random_writes(seed);
    Model model;
    try {
      for (std::uint64_t version = 1;; ++version) {
        WriteSome(store, random_writes, version, model);
        if (version % 3 == 0) store.Commit("", "");
      }
    } catch (const ClosedError&) {
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20 + random() % 100));
  store.Close();
  worker.join();
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc > 1);
  const std::filesystem::path root = argv[1];
  const int steps = argc > 2 ? std::atoi(argv[2]) : 300;
  const std::uint64_t first = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
  const auto fresh = [&](const char* name) {
    std::filesystem::remove_all(root / name);
    std::filesystem::create_directories(root / name);
    return (root / name).string();
  };
  for (std::uint64_t seed = first; seed < first + 3; ++seed) {
    MemoryEnv memory;
    RunWorkload(memory, "disk", ReadEngine::kAuto, steps, seed);
    RunWorkload(PosixEnv(), fresh("auto"), ReadEngine::kAuto, steps, seed);
    RunWorkload(PosixEnv(), fresh("pread"), ReadEngine::kPread, steps, seed);
    MemoryEnv other_memory;
    ReadMeanwhile(other_memory, "disk", ReadEngine::kAuto, steps, seed);
    ReadMeanwhile(PosixEnv(), fresh("meanwhile"), ReadEngine::kAuto, steps, seed);
    ReadMeanwhile(PosixEnv(), fresh("meanwhile"), ReadEngine::kPread, steps, seed);
    for (const std::uint32_t row_bytes : {16u, 272u, 528u, 2080u}) {
      for (const std::uint64_t off : {0, 1, 2}) CommitAtEnds(row_bytes, off, ReadEngine::kAuto);
    }
    StayWithinACap(seed);
    for (std::uint64_t i = 0; i < 20; ++i) CloseBesideASnapshot(seed * 100 + i);
    for (const char* step : {"sync", "rename"}) RunOutOfMemory(step, seed);
    for (std::uint64_t i = 0; i < 10; ++i) {
      CloseMeanwhile(PosixEnv(), fresh("close"), i % 2 == 0 ? ReadEngine::kAuto : ReadEngine::kPread,
                     seed * 100 + i);
    }
  }
  std::puts("ok");
}
