// Fuzz target for all that is parsed from disk. The input's first byte says what the rest is: a manifest, a
// segment, an INDEX, or pieces that replace parts of the files of a whole small store, which is then opened
// and read.
//
// With clang: clang++ -fsanitize=fuzzer,address -Icsrc ... ; without, the program below mutates seeds of its
// own:
//   fuzz_formats [ITERATIONS] [SEED]
#include <random>

#include "common/crc32c.h"
#include "io/errors.h"
#include "io/memory_env.h"
#include "store/errors.h"
#include "store/store.h"
#include "store/tests/check.h"

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

void OpenAndRead(MemoryEnv& env) {
  try {
    Store store(env, "disk", Config(), {});
    std::vector<std::byte> row(kRowBytes);
    for (std::uint64_t key = 0; key < kRows; ++key) {
      bool found = false;
      try {
        store.Read({&key, 1}, row.data(), kRowBytes, &found);
        for (const std::byte byte : row) CHECK(!found || byte == std::byte{0});
      } catch (const CorruptError&) {
      } catch (const InputError&) {
      }
    }
  } catch (const CorruptError&) {
  } catch (const InputError&) {
  } catch (const IoError&) {
  }
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
        std::vector<TableIndex::Entry> entries(SnapshotReader::kEntriesPerGroup);
        for (const auto& table : reader->header().tables) {
          TableIndex index;
          index.Reserve(table.entries);
          for (std::uint64_t left = table.entries; left > 0;) {
            const std::size_t n = std::min<std::uint64_t>(left, entries.size());
            if (!reader->Read(entries.data(), n) || !index.Append(entries.data(), n)) return;
            left -= n;
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
  if (what < 3) {
    std::vector<std::byte> copy(bytes + 1, bytes + size);
    if (mend) MendChecksums(what, copy);
    ParseOne(what, copy);
    return 0;
  }
  // file, offset (2 bytes, in units of 8), bytes
  auto image = WholeStore().AfterCrash(~std::size_t{0}, MemoryEnv::Unsynced::kKept, 0);
  const std::string name = FileNames()[data[1] % FileNames().size()], path = "disk/" + name;
  std::vector<std::byte> contents = image->Contents(path);
  const std::size_t at = (data[2] | data[3] << 8) * 8u % (contents.size() + 1);
  const std::size_t n = std::min(size - 4, contents.size() - at);
  if (n > 0) std::memcpy(contents.data() + at, bytes + 4, n);
  if (size == 4) contents.resize(at);
  if (mend) MendChecksums(KindOf(name), contents);
  image->SetContents(path, contents);
  OpenAndRead(*image);
  return 0;
}

#ifndef TIERSTORE_LIBFUZZER

int main(int argc, char** argv) {
  const long iterations = argc > 1 ? std::atol(argv[1]) : 20000;
  std::mt19937_64 random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  std::vector<std::vector<std::uint8_t>> seeds;
  for (const std::string& name : FileNames()) {
    const auto contents = WholeStore().Contents("disk/" + name);
    std::vector<std::uint8_t> seed{static_cast<std::uint8_t>(name == "MANIFEST" ? 0
                                                             : name == "INDEX"  ? 2
                                                                                : 1)};
    for (const std::byte byte : contents) seed.push_back(static_cast<std::uint8_t>(byte));
    seeds.push_back(std::move(seed));
  }
  for (long i = 0; i < iterations; ++i) {
    std::vector<std::uint8_t> input;
    if (i % 4 == 0) {
      input = {static_cast<std::uint8_t>(3 | (random() & 4)), static_cast<std::uint8_t>(random()),
               static_cast<std::uint8_t>(random()), static_cast<std::uint8_t>(random() % 6)};
      for (std::size_t n = random() % 24; n > 0; --n) input.push_back(static_cast<std::uint8_t>(random()));
    } else {
      input = seeds[random() % seeds.size()];
      for (std::size_t n = 1 + random() % 4; n > 0; --n) {
        input[1 + random() % (input.size() - 1)] =
            static_cast<std::uint8_t>(random() % 3 == 0 ? 0xff : random());
      }
      if (random() % 4 == 0) input.resize(1 + random() % input.size());
      input[0] |= random() & 4;
    }
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::puts("ok");
}

#endif
