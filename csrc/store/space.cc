#include "store/space.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <map>

#include "store/errors.h"

namespace tierstore {
namespace {

// Returns "1.5 GiB", "24 MiB", "272 B", as tierstore.config.format_bytes does.
std::string FormatBytes(std::uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, value < 1000 ? "%.4g %s" : "%.0f %s", value, kUnits[unit]);
  return text;
}

}  // namespace

Space::Space(const StoreContext& context, const RowIndex& rows, const SegmentSet& segments,
             const CommitLog& commits)
    : context_(context),
      rows_(rows),
      segments_(segments),
      commits_(commits),
      cap_bytes_(context.config.cap_bytes) {}

// Returns the bytes that only compaction may use, so that compaction can always go on: a segment to copy to,
// and half a segment more. For a victim gives back less than the new segment takes at first (footers), and
// several victims may be needed until they have given back more.
std::uint64_t Space::Reserve() const {
  const std::uint64_t largest = rows_.LargestSegmentBytes();
  return largest + largest / 2;
}

// As many bytes of superseded rows are tolerated as there are live bytes, which makes uniform overwrites cost
// about 1.26 times their bytes. Fewer bytes are tolerated where a commit keeps superseded rows, since the
// rows that replace them must fit the cap, too.
Survey Space::TakeSurvey() const {
  Survey survey;
  survey.released = segments_.released_bytes();
  for (const auto& [row_bytes, row_class] : rows_.classes()) {
    survey.live += row_class->counts.live * row_class->geometry.record_bytes;
    survey.dead += row_class->counts.Dead() * row_class->geometry.record_bytes;
  }
  const std::uint64_t used = UsedBytes();
  survey.unit = rows_.LargestSegmentBytes();
  survey.free = used < cap_bytes_ ? cap_bytes_ - used : 0;
  survey.tolerated = survey.live;
  if (!commits_.kept.empty()) {
    const std::uint64_t spare = cap_bytes_ > 2 * survey.live ? (cap_bytes_ - 2 * survey.live) / 2 : 0;
    survey.tolerated = std::clamp(spare, survey.live / 4, survey.live);
  }
  survey.tolerated += 2 * survey.unit;
  return survey;
}

bool Space::CountsAreExact() const {
  std::map<const RowClass*, Counts> counted;
  std::uint64_t released = 0;
  for (const auto& [number, segment] : segments_.by_number()) {
    Counts& counts = counted[segment->row_class];
    const Counts own = segment->Count();
    counts = {counts.slots + own.slots, counts.live + own.live, counts.kept + own.kept};
    if (segment->IsReleased()) released += segment->reserved_bytes;
  }
  return released == segments_.released_bytes() &&
         std::all_of(rows_.classes().begin(), rows_.classes().end(), [&](const auto& entry) {
           const RowClass& row_class = *entry.second;
           const auto used = std::count_if(row_class.segments.begin(), row_class.segments.end(),
                                           [](const SegmentPtr& segment) { return segment != nullptr; });
           return row_class.counts == counted[&row_class] &&
                  row_class.used_ordinals == static_cast<std::uint64_t>(used);
         });
}

void Space::ThrowNoOrdinal(const RowClass& row_class) const {
  throw FullError(
      context_.directory + ": a store has places for " +
      std::to_string(row_class.max_ordinals * row_class.slots_per_segment) + " versions of rows of " +
      std::to_string(row_class.geometry.row_bytes) + " bytes, and " + std::to_string(row_class.counts.live) +
      " rows take so many of them that no more can be won by compaction. Space on the device does not "
      "help: divide the tables of this row size among several stores (shards), or give them fewer rows");
}

// Says which bytes older commits hold that compaction could win without these commits: " Older commits keep 3
// MiB of ...", or "" when they hold nothing. The oldest commit comes first, since a segment is won when no
// older commit names it any more.
std::string Space::DescribeOlderCommits() const {
  std::map<std::uint32_t, std::uint64_t> last_to_name;  // by segment: the id of the newest older commit
  for (const CommitRecord& commit : commits_.kept) {
    if (commit.id == commits_.current_id) continue;
    for (const SegmentExtent& extent : commit.segments) last_to_name[extent.number] = commit.id;
  }
  std::map<std::uint64_t, std::uint64_t> held;  // by commit
  std::uint64_t total = 0;
  for (const auto& [number, id] : last_to_name) {
    const Segment& segment = *segments_.At(number);
    const std::uint64_t needed = segment.BytesOfCopies(segment.Needed());
    if (needed >= segment.reserved_bytes) continue;
    held[id] += segment.reserved_bytes - needed;
    total += segment.reserved_bytes - needed;
  }
  std::string drops;
  for (const CommitRecord& commit : commits_.kept) {
    if (commit.id == commits_.current_id) continue;
    drops += (drops.empty() ? "commit " : ", then commit ") + std::to_string(commit.id) +
             (commit.tag.empty() ? "" : " (tag '" + commit.tag + "')") + " for " +
             FormatBytes(held[commit.id]);
  }
  if (total == 0) return "";
  return " Older commits keep " + FormatBytes(total) + " of superseded rows: drop (drop_commit) " + drops +
         ".";
}

void Space::ThrowFull(std::uint64_t bytes) const {
  const std::uint64_t live = TakeSurvey().live;
  const std::uint64_t needed = UsedBytes() + bytes + Reserve();
  throw FullError(context_.directory + ": the cap of " + FormatBytes(cap_bytes_) +
                  " is reached: " + FormatBytes(UsedBytes()) + " are in use, " + FormatBytes(live) +
                  " of them by live rows." + DescribeOlderCommits() + " To go on raise the cap by at least " +
                  std::to_string(needed - cap_bytes_) + " bytes, to " + std::to_string(needed) +
                  ", here or at the next opening, or commit after fewer rows. What was written before is not "
                  "lost and can be committed");
}

}  // namespace tierstore
