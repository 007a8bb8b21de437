// Feeds damaged files to every parser of the store, to verification, and to whole stores: any error may come,
// but no crash, no wrong row, and no damage that verification overlooks. Checksums are mended in half of the
// inputs, as whoever makes a hostile file would.
//
// With clang: clang++ -fsanitize=fuzzer,address -DTIERSTORE_LIBFUZZER -Icsrc … csrc/store/tests/corpus. With
// gcc the program below mutates the corpus itself, and keeps what reaches new code
// (-fsanitize-coverage=trace-pc):
//   fuzz_formats CORPUS [ITERATIONS] [SEED] [FOLDER FOR WHAT REACHES NEW CODE]
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "common/crc32c.h"
#include "common/key.h"
#include "common/tests/check.h"
#include "io/errors.h"
#include "io/memory_env.h"
#include "store/errors.h"
#include "store/read_cost.h"
#include "store/store.h"
#include "store/verify.h"

using namespace tierstore;

namespace {

constexpr std::uint32_t kRows = 60, kRowBytes = 272;

StoreConfig Config() {
  StoreConfig config;
  config.cap_bytes = 4 << 20;
  config.segment_bytes = 12 << 10;
  config.snapshot_min_rows = 1;
  config.store_id = StoreId{};
  return config;
}

// A store with sealed, relocated and unfinished segments and a saved index.
MemoryEnv& WholeStore() {
  static MemoryEnv* env = [] {
    auto* made = new MemoryEnv;
    Store store(*made, "disk", Config(), {});
    std::vector<std::uint64_t> keys(kRows);
    std::vector<std::byte> rows(kRows * kRowBytes);
    for (std::uint32_t i = 0; i < kRows; ++i) keys[i] = i;
    for (int version = 0; version < 4; ++version) {
      store.Write(std::span(keys).first(kRows - 10 * version), rows.data(), kRowBytes);
      store.Compact();
      store.Commit("meta", "tag");
    }
    store.Close();
    return made;
  }();
  return *env;
}

// The file DEVICE, which a store as small as this one has none of. Its parser gets the inputs with kDevice.
constexpr std::uint8_t kDevice = 8;

const std::vector<std::byte>& WholeDevice() {
  static const std::vector<std::byte> bytes = [] {
    MemoryEnv env;
    ReadCost{{20000, 25000, 50000}}.Save(env, "disk");
    return env.Contents("disk/DEVICE");
  }();
  return bytes;
}

const std::vector<std::string>& FileNames() {
  static const std::vector<std::string> names = WholeStore().List("disk");
  return names;
}

void PutCrc(std::vector<std::byte>& bytes, std::size_t begin, std::size_t end) {
  if (begin > end || end + 4 > bytes.size()) return;
  const std::uint32_t crc = Crc32c(bytes.data() + begin, end - begin);
  std::memcpy(&bytes[end], &crc, 4);
}

void MendChecksums(std::uint8_t what, std::vector<std::byte>& bytes) {
  const std::size_t size = bytes.size();
  if (what == 0 && size >= 4) PutCrc(bytes, 0, size - 4);
  if (what == 1) {
    PutCrc(bytes, 0, 48);
    if (size >= kTrailerBytes) PutCrc(bytes, size - kTrailerBytes, size - 4);
  }
  if (what == 2 && size >= 16) {
    std::uint32_t body_bytes;
    std::memcpy(&body_bytes, &bytes[12], 4);
    PutCrc(bytes, 0, std::size_t{16} + body_bytes);
  }
}

std::uint8_t KindOf(const std::string& name) { return name == "MANIFEST" ? 0 : name == "INDEX" ? 2 : 1; }

void MendDevice(std::vector<std::byte>& bytes) { PutCrc(bytes, 0, 16 + 8 * ReadCost::kSizes.size()); }

void OpenAndRead(MemoryEnv& env) {
  const VerifyReport report = VerifyStore(env, "disk", {{0, kRowBytes}}, [](std::uint64_t, std::uint64_t) {});
  const auto may_fail = [&](const std::exception& error) {
    if (report.findings_total > 0) return;
    std::fprintf(stderr, "verification overlooked: %s\n", error.what());
    CHECK(false);
  };
  try {
    Store store(env, "disk", Config(), {});
    std::vector<std::byte> row(kRowBytes);
    for (std::uint64_t key = 0; key < kRows; ++key) {
      bool found = false;
      try {
        store.Read({&key, 1}, {row.data(), kRowBytes}, &found);
        for (const std::byte byte : row) CHECK(!found || byte == std::byte{0});
      } catch (const CorruptError& error) {
        may_fail(error);
      } catch (const InputError& error) {
        may_fail(error);
      }
    }
  } catch (const CorruptError& error) {
    may_fail(error);
  } catch (const InputError& error) {
    may_fail(error);
  } catch (const IoError& error) {
    may_fail(error);
  }
}

void ParseDevice(const std::vector<std::byte>& bytes) {
  MemoryEnv env;
  env.SetContents("disk/DEVICE", bytes);
  const auto cost = ReadCost::Load(env, "disk");
  CHECK(!cost || cost->MergeGap() <= kMaxReadBytes);
  CHECK(cost || bytes != WholeDevice());
}

void ParseOne(std::uint8_t what, std::span<const std::byte> bytes) {
  MemoryEnv env;
  env.SetContents("disk/file", {bytes.begin(), bytes.end()});
  try {
    switch (what) {
      case 0:
        Manifest::Decode(bytes, "file");
        return;
      case 1: {
        const SegmentHeader header = SegmentHeader::Decode(bytes, "file");
        auto file = env.Open("disk/file", OpenMode::kRead, false);
        Footer::Load(*file, header);
        return;
      }
      default: {
        env.SetContents("disk/INDEX", {bytes.begin(), bytes.end()});
        auto reader = SnapshotReader::Open(env, "disk", false, StoreId{});
        if (reader == nullptr) return;
        SnapshotReader::Groups groups;
        const std::vector<TableIndex::Entry>& entries = groups.entries;
        for (std::size_t table = 0; table < reader->header().tables.size(); ++table) {
          TableIndex index;
          index.Reserve(reader->header().tables[table].entries);
          for (std::uint64_t group = 0; group < reader->GroupsOf(table); ++group) {
            if (!reader->Read(table, group, 1, groups) || !index.Append(entries.data(), entries.size()))
              return;
          }
          for (std::size_t range = 0; range < reader->header().tables[table].ranges.size(); ++range) {
            if (!reader->ReadRange(table, range, groups)) return;
          }
        }
      }
    }
  } catch (const CorruptError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 4) return 0;
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  const bool mend = (data[0] & 4) != 0;
  const std::uint8_t what = data[0] & 3;
  const bool device = (data[0] & kDevice) != 0;
  if (what < 3) {
    std::vector<std::byte> copy(bytes + 1, bytes + size);
    if (device) {
      if (mend) MendDevice(copy);
      ParseDevice(copy);
      return 0;
    }
    if (mend) MendChecksums(what, copy);
    ParseOne(what, copy);
    return 0;
  }
  // file, offset (2 bytes, in units of 8), bytes
  auto image = WholeStore().AfterCrash(~std::size_t{0}, MemoryEnv::Unsynced::kKept, 0);
  const std::string name = device ? "DEVICE" : FileNames()[data[1] % FileNames().size()];
  const std::string path = "disk/" + name;
  std::vector<std::byte> contents = device ? WholeDevice() : image->Contents(path);
  const std::size_t at = (data[2] | data[3] << 8) * 8u % (contents.size() + 1);
  const std::size_t n = std::min(size - 4, contents.size() - at);
  if (n > 0) std::memcpy(contents.data() + at, bytes + 4, n);
  if (size == 4) contents.resize(at);
  if (mend && device) MendDevice(contents);
  if (mend && !device) MendChecksums(KindOf(name), contents);
  image->SetContents(path, contents);
  OpenAndRead(*image);
  return 0;
}

#ifndef TIERSTORE_LIBFUZZER

namespace {

// By hash of the place in the code. Plain memory, since what the function below calls would call it.
unsigned char reached[1 << 16];
std::size_t places = 0;

}  // namespace

extern "C" __attribute__((no_sanitize_coverage, no_sanitize_address)) void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
  unsigned char* seen = &reached[(place ^ place >> 16) & 0xffff];
  if (__atomic_load_n(seen, __ATOMIC_RELAXED) != 0) return;
  if (__atomic_exchange_n(seen, 1, __ATOMIC_RELAXED) == 0) __atomic_fetch_add(&places, 1, __ATOMIC_RELAXED);
}

namespace {

using Input = std::vector<std::uint8_t>;

std::vector<Input> LoadCorpus(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Input> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

Input AsInput(std::uint8_t kind, const std::vector<std::byte>& contents) {
  Input input{kind};
  for (const std::byte byte : contents) input.push_back(static_cast<std::uint8_t>(byte));
  return input;
}

// The files of an undamaged store, as inputs for their parsers.
void AddWholeFiles(std::vector<Input>& corpus) {
  corpus.push_back(AsInput(kDevice, WholeDevice()));
  for (const std::string& name : FileNames()) {
    corpus.push_back(AsInput(KindOf(name), WholeStore().Contents("disk/" + name)));
  }
}

Input PatchOfAStore(std::mt19937_64& random) {
  Input input{static_cast<std::uint8_t>(3 | (random() & 4) | (random() % 16 == 0 ? kDevice : 0)),
              static_cast<std::uint8_t>(random()), static_cast<std::uint8_t>(random()),
              static_cast<std::uint8_t>(random() % 6)};
  for (std::size_t n = random() % 24; n > 0; --n) input.push_back(static_cast<std::uint8_t>(random()));
  return input;
}

Input Mutate(Input input, std::mt19937_64& random) {
  static constexpr std::uint8_t kTelling[] = {0, 1, 0x7f, 0x80, 0xff};
  if (input.size() < 2) return input;
  for (std::size_t n = 1 + random() % 4; n > 0; --n) {
    input[1 + random() % (input.size() - 1)] =
        random() % 2 == 0 ? kTelling[random() % std::size(kTelling)] : static_cast<std::uint8_t>(random());
  }
  if (random() % 4 == 0) input.resize(1 + random() % input.size());
  input[0] ^= random() & 4;
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc > 1);
  std::vector<Input> corpus = LoadCorpus(argv[1]);
  const long iterations = argc > 2 ? std::atol(argv[2]) : 20000;
  std::mt19937_64 random(argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
  const std::size_t kept = corpus.size();
  AddWholeFiles(corpus);
  for (const Input& input : corpus) LLVMFuzzerTestOneInput(input.data(), input.size());
  const std::size_t before = places;
  for (long i = 0; i < iterations; ++i) {
    const std::size_t reached_before = places;
    Input input = i % 4 == 0 ? PatchOfAStore(random) : Mutate(corpus[random() % corpus.size()], random);
    LLVMFuzzerTestOneInput(input.data(), input.size());
    if (places == reached_before) continue;
    if (argc > 4) {
      const auto path = std::filesystem::path(argv[4]) / ("input-" + std::to_string(MixKey(places + i)));
      std::ofstream(path, std::ios::binary)
          .write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
    }
    corpus.push_back(std::move(input));
  }
  std::printf("ok: %zu inputs kept, %ld tried, %zu places in the code reached, %zu of them by new inputs\n",
              kept, iterations, places, places - before);
}

#endif
