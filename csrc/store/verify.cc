#include "store/verify.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "common/key.h"
#include "common/thread_pool.h"
#include "io/errors.h"
#include "store/errors.h"
#include "store/index_snapshot.h"
#include "store/manifest.h"
#include "store/read_cost.h"
#include "store/verify_segment.h"

namespace tierstore {
namespace {

constexpr std::size_t kSegmentsAtOnce = 16;  // as many as threads are, at most

// SavedIndex is the saved index, and counts how many of its entries point to each segment and were found
// there.
class SavedIndex {
 public:
  // Returns nullptr when there is no saved index, and reports damage.
  static std::unique_ptr<SavedIndex> Load(const VerifyContext& context, const Manifest& manifest);

  // Compares a record of a segment, all of whose records are visited.
  void Visit(std::uint32_t number, std::uint32_t row_bytes, std::uint32_t slot, std::uint64_t key);
  // Reports entries that differ from the intact segment `number`.
  void Compare(const VerifyContext& context, const NamedSegment& segment);
  // Reports rows that the index leaves to later records, if there are no later records. Call it when all
  // segments are read.
  void CompareChanged(const VerifyContext& context) const;

 private:
  struct Tally {
    std::uint32_t row_bytes = 0, ordinal = 0, slot_bits = 0;
    std::uint32_t covered = 0;  // leading slots that are in the index
    std::uint64_t entries = 0, found = 0;
    std::uint64_t unknown = 0;  // records that the index does not have
  };

  // An index holds this location in place of kChanged.
  static constexpr Location kInLaterRecord = TableIndex::kMaxLocation;

  bool ReadTables(const SnapshotReader& reader, const VerifyContext& context);
  void NoteChanged(std::uint32_t table, bool in_ranges, std::vector<TableIndex::Entry>& entries);

  std::map<std::uint32_t, Tally> segments_;  // by number
  std::vector<std::uint64_t> changed_;       // keys of rows with later records; sorted
  std::vector<std::uint8_t> seen_;           // of each key, whether a later record was visited
  std::map<std::uint32_t, std::unique_ptr<TableLocations>> tables_;
};

void Report(const VerifyContext& context, const char* file, std::uint64_t offset, std::uint64_t bytes,
            std::string what) {
  context.Add({file, offset, bytes, std::move(what), false, {}, {}, {}});
}

std::unique_ptr<SavedIndex> SavedIndex::Load(const VerifyContext& context, const Manifest& manifest) {
  const std::string path = context.directory + "/" + kSnapshotName;
  std::uint64_t size = 0;
  try {
    if (!context.env.Exists(path)) return nullptr;
    auto file = context.env.Open(path, OpenMode::kRead, false);
    size = file->Size();
    const auto reader = SnapshotReader::Open(context.env, context.directory, false, context.store);
    if (reader == nullptr) {
      Report(context, kSnapshotName, 0, size, "the saved index is damaged or of another store");
      return nullptr;
    }
    const SnapshotHeader& header = reader->header();
    const std::uint64_t used = header.UsedBytes();
    Bytes rest(size - used);
    rest.resize(file->Read(used, rest.data(), rest.size()));
    if (std::any_of(rest.begin(), rest.end(), [](std::byte byte) { return byte != std::byte{0}; }))
      Report(context, kSnapshotName, used, rest.size(), "unused bytes that should be zero are not");

    auto index = std::make_unique<SavedIndex>();
    for (const auto& row_class : header.classes) {
      for (std::uint32_t ordinal = 0; ordinal < row_class.segments.size(); ++ordinal) {
        const auto& [number, slots] = row_class.segments[ordinal];
        if (number != 0)
          index->segments_[number] = {row_class.row_bytes, ordinal, row_class.slot_bits, slots, 0, 0, 0};
      }
    }
    if (!index->ReadTables(*reader, context)) return nullptr;
    std::sort(index->changed_.begin(), index->changed_.end());
    index->seen_.resize(index->changed_.size());
    context.advance(size);
    const bool serves =
        std::any_of(manifest.commits.begin(), manifest.commits.end(), [&](const CommitRecord& commit) {
          return commit.history == header.history && commit.id >= header.commit;
        });
    return serves ? std::move(index) : nullptr;
  } catch (const CorruptError& error) {
    Report(context, kSnapshotName, 0, size, error.what());
  } catch (const InputError& error) {
    Report(context, kSnapshotName, 0, size, error.what());
  } catch (const IoError& error) {
    Report(context, kSnapshotName, 0, size, error.what());
  }
  return nullptr;
}

bool SavedIndex::ReadTables(const SnapshotReader& reader, const VerifyContext& context) {
  const SnapshotHeader& header = reader.header();
  const std::uint64_t size = reader.file_bytes();
  SnapshotReader::Groups groups;
  std::vector<TableIndex::Entry>& entries = groups.entries;
  for (std::size_t number = 0; number < header.tables.size(); ++number) {
    const auto& table = header.tables[number];
    const auto row_class =
        std::find_if(header.classes.begin(), header.classes.end(),
                     [&](const auto& candidate) { return candidate.row_bytes == table.row_bytes; });
    if (row_class == header.classes.end()) {
      Report(context, kSnapshotName, 0, size, "the saved index has a table of no row size");
      return false;
    }
    auto& index = tables_[table.table];
    index = std::make_unique<TableLocations>(IndexForm{0, DenseRanges::kRangeBits});
    index->hash().Reserve(table.entries);
    const std::uint64_t parts = reader.GroupsOf(number);
    for (std::uint64_t part = 0; part < parts + table.ranges.size(); ++part) {
      const bool in_ranges = part >= parts;
      bool intact =
          in_ranges ? reader.ReadRange(number, part - parts, groups) : reader.Read(number, part, 1, groups);
      if (intact) NoteChanged(table.table, in_ranges, entries);
      if (intact && !in_ranges) intact = index->hash().Append(entries.data(), entries.size());
      if (intact && in_ranges) {
        for (const auto& [id, location] : entries)
          intact = index->Put(id, location) == TableIndex::kAbsent && intact;
      }
      if (!intact) {
        Report(context, kSnapshotName, 0, size,
               "entries of table " + std::to_string(table.table) + " in the saved index are damaged");
        return false;
      }
      for (const TableIndex::Entry& entry : entries) {
        if (entry.location == kInLaterRecord) continue;
        const Location ordinal = entry.location >> row_class->slot_bits;
        const Location slot = entry.location & ((Location{1} << row_class->slot_bits) - 1);
        const bool exists = ordinal < row_class->segments.size() &&
                            slot < row_class->segments[ordinal].slots &&
                            row_class->segments[ordinal].number != 0;
        if (!exists) {
          Report(context, kSnapshotName, 0, size, "the saved index points to places that have no record");
          return false;
        }
        ++segments_[row_class->segments[ordinal].number].entries;
      }
    }
  }
  return true;
}

void SavedIndex::NoteChanged(std::uint32_t table, bool in_ranges, std::vector<TableIndex::Entry>& entries) {
  for (TableIndex::Entry& entry : entries) {
    if (entry.location != kChanged) continue;
    entry.location = kInLaterRecord;
    changed_.push_back(MakeKey(table, in_ranges ? entry.hash : TableIndex::Unpermute(entry.hash)));
  }
}

void SavedIndex::Visit(std::uint32_t number, std::uint32_t row_bytes, std::uint32_t slot, std::uint64_t key) {
  const auto segment = segments_.find(number);
  if (segment == segments_.end() || slot >= segment->second.covered) {
    const auto changed = std::lower_bound(changed_.begin(), changed_.end(), key);
    if (changed == changed_.end() || *changed != key) return;
    std::atomic_ref<std::uint8_t>(seen_[static_cast<std::size_t>(changed - changed_.begin())]).store(1);
    return;
  }
  Tally& tally = segment->second;
  if (tally.row_bytes != row_bytes) return;
  const auto table = tables_.find(KeyTable(key));
  const Location location = table == tables_.end() ? TableIndex::kAbsent : table->second->Find(KeyId(key));
  if (location == TableIndex::kAbsent) {
    ++tally.unknown;
  } else if (location == (Location{tally.ordinal} << tally.slot_bits | slot)) {
    ++tally.found;
  }
}

void SavedIndex::Compare(const VerifyContext& context, const NamedSegment& segment) {
  const auto found = segments_.find(segment.number);
  if (found == segments_.end() || found->second.covered > segment.slots) return;
  const Tally& tally = found->second;
  context.report.index_entries += tally.found;
  if (tally.unknown == 0 && tally.found == tally.entries) return;
  Report(context, kSnapshotName, 0, 0,
         "the saved index contradicts " + SegmentName(segment.number) + ": " +
             std::to_string(tally.entries - tally.found) + " entries point to other rows there, and " +
             std::to_string(tally.unknown) + " rows are not in it");
}

void SavedIndex::CompareChanged(const VerifyContext& context) const {
  const auto unseen = std::count(seen_.begin(), seen_.end(), 0);
  if (unseen == 0 || context.report.findings_total > 0) return;
  Report(context, kSnapshotName, 0, 0,
         "the saved index leaves " + std::to_string(unseen) + " rows to later records that do not exist");
}

// Returns the segments that kept commits name, by number.
std::map<std::uint32_t, NamedSegment> SegmentsOf(const Manifest& manifest) {
  std::map<std::uint32_t, NamedSegment> named;
  for (const CommitRecord& commit : manifest.commits) {
    for (const SegmentExtent& extent : commit.segments) {
      NamedSegment& segment = named[extent.number];
      segment.number = extent.number;
      segment.slots = std::max(segment.slots, extent.slots);
      segment.sealed = segment.sealed || !extent.appending;
      segment.commits.emplace_back(commit.id, extent.slots);
    }
  }
  return named;
}

void VerifySegment(const VerifyContext& context, const NamedSegment& segment, SavedIndex* index) {
  const SegmentVerifier::Visit visit = [&](std::uint32_t bytes, std::uint32_t slot, std::uint64_t key) {
    if (index != nullptr) index->Visit(segment.number, bytes, slot, key);
  };
  const bool intact = SegmentVerifier(context, segment, visit).Verify();
  if (intact && index != nullptr) index->Compare(context, segment);
}

// Verifies several segments at a time. The findings come in the order of the segments' numbers.
void VerifySegments(const VerifyContext& context, const std::map<std::uint32_t, NamedSegment>& named,
                    SavedIndex* index) {
  std::vector<const NamedSegment*> segments;
  for (const auto& [number, segment] : named) segments.push_back(&segment);
  const auto caller = std::this_thread::get_id();
  std::atomic<std::uint64_t> unreported{0};
  const auto report_bytes = [&] { context.advance(unreported.exchange(0)); };
  for (std::size_t first = 0; first < segments.size(); first += kSegmentsAtOnce) {
    const std::size_t n = std::min(segments.size() - first, kSegmentsAtOnce);
    std::vector<VerifyReport> reports(n);
    ParallelFor(0, static_cast<std::int64_t>(n), 1, [&](std::int64_t i, std::int64_t) {
      const auto at = static_cast<std::size_t>(i);
      const VerifyContext own{context.env,
                              context.directory,
                              context.store,
                              context.next_segment,
                              context.row_bytes,
                              reports[at],
                              [&](std::uint64_t bytes) {
                                unreported += bytes;
                                if (std::this_thread::get_id() == caller) report_bytes();
                              }};
      VerifySegment(own, *segments[first + at], index);
    });
    report_bytes();
    for (VerifyReport& part : reports) context.Merge(std::move(part));
  }
}

std::uint64_t SizeOf(Env& env, const std::string& path) {
  try {
    return env.Exists(path) ? env.Open(path, OpenMode::kRead, false)->Size() : 0;
  } catch (const std::runtime_error&) {
    return 0;  // reading the file will meet and report the error
  }
}

std::optional<Manifest> LoadManifest(const VerifyContext& context, bool has_segments) {
  const auto lost = [&](std::string what) {
    context.Add({kManifestName, 0, 0, std::move(what), true, {}, {}, {}});
  };
  try {
    auto manifest = Manifest::Load(context.env, context.directory);
    if (!manifest && has_segments) lost("the file is missing, though there are segments");
    if (!manifest) return std::nullopt;
    const auto later = [](const CommitRecord& a, const CommitRecord& b) { return a.id >= b.id; };
    if (std::adjacent_find(manifest->commits.begin(), manifest->commits.end(), later) !=
        manifest->commits.end())
      lost("the commits of the manifest are not in order");
    return manifest;
  } catch (const CorruptError& error) {
    lost(error.what());
  } catch (const IoError& error) {
    lost(error.what());
  }
  return std::nullopt;
}

}  // namespace

VerifyReport VerifyStore(Env& env, const std::string& directory,
                         const std::map<std::uint32_t, std::uint32_t>& row_bytes,
                         const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  VerifyReport report;
  std::vector<std::string> names = env.List(directory);
  std::sort(names.begin(), names.end());
  std::uint64_t total = 0;
  VerifyContext context{env, directory, {}, 0, row_bytes, report, [&](std::uint64_t bytes) {
                          report.bytes += bytes;
                          progress(report.bytes, std::max(total, report.bytes));
                        }};
  const bool has_segments = std::any_of(names.begin(), names.end(),
                                        [](const auto& name) { return ParseSegmentName(name).has_value(); });
  const std::optional<Manifest> manifest = LoadManifest(context, has_segments);
  const auto named = manifest ? SegmentsOf(*manifest) : std::map<std::uint32_t, NamedSegment>{};
  for (const std::string& name : names) {
    const auto number = ParseSegmentName(name);
    const bool ours = name == kManifestName || name == kSnapshotName || name == kReadCostName ||
                      (number && named.contains(*number));
    if (ours) {
      total += SizeOf(env, directory + "/" + name);
      ++report.files;
    } else if (manifest && (number || name == kManifestTemporaryName || name == kSnapshotTemporaryName ||
                            name == kReadCostTemporaryName)) {
      report.leftovers.push_back(name);
    } else if (!number) {
      report.foreign.push_back(name);
    }
  }
  if (!manifest) return report;
  context.store = manifest->store;
  context.next_segment = manifest->next_segment;
  report.commits = manifest->commits.size();
  context.advance(SizeOf(env, directory + "/" + kManifestName));

  const auto index = SavedIndex::Load(context, *manifest);
  VerifySegments(context, named, index.get());
  if (index != nullptr) index->CompareChanged(context);
  return report;
}

}  // namespace tierstore
