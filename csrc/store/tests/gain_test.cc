// GainCount with segments that compaction copies at once, in two parts, or in part only. Fails by abort.
#include "store/gain.h"

#include "common/tests/check.h"

using namespace tierstore;

namespace {

constexpr std::uint32_t kSlots = 1000;

using Segments = std::map<std::uint32_t, SegmentPtr>;

struct Rows {
  RowClass row_class;
  Segments segments;

  Rows() {
    row_class.geometry = Geometry::For(64);
    row_class.slots_per_segment = kSlots;
  }
  // A sealed segment: the last commit alone needs `kept` of its rows.
  SegmentPtr Make(std::uint32_t number, std::uint32_t live, std::uint32_t kept) {
    auto segment = std::make_shared<Segment>();
    segment->row_class = &row_class;
    segment->number = number;
    segment->slots = segment->capacity = kSlots;
    segment->live = live;
    segment->kept = kept;
    segment->sealed = true;
    segment->reserved_bytes = row_class.MaxSegmentBytes(false);
    return segment;
  }
  SegmentPtr Add(std::uint32_t number, std::uint32_t live, std::uint32_t kept) {
    return segments[number] = Make(number, live, kept);
  }
};

std::int64_t BytesOf(const Segment& segment) { return static_cast<std::int64_t>(segment.reserved_bytes); }

std::int64_t BytesOfCopies(const Segment& segment, std::uint32_t rows) {
  return static_cast<std::int64_t>(segment.BytesOfCopies(rows));
}

void CopyAtOnce() {
  Rows rows;
  GainCount gain;
  const SegmentPtr segment = rows.Add(1, 300, 200);
  gain.Count({segment, true}, rows.segments);
  CHECK(gain.bytes() == BytesOf(*segment) - BytesOfCopies(*segment, 500));
  gain.Reset(-4096);
  const SegmentPtr other = rows.Add(2, 300, 0);
  gain.Count({other, false}, rows.segments);
  CHECK(gain.bytes() == BytesOf(*other) - BytesOfCopies(*other, 300) - 4096);
  gain.Subtract(100);
  CHECK(gain.bytes() == BytesOf(*other) - BytesOfCopies(*other, 300) - 4196);
}

// The segment's bytes are won once, and each copy takes its bytes once.
void CopyInParts() {
  Rows rows;
  GainCount gain;
  const SegmentPtr segment = rows.Add(1, 300, 200);
  gain.Count({segment, false}, rows.segments);
  CHECK(gain.bytes() == 0);
  const std::int64_t first = BytesOfCopies(*segment, 300);
  segment->live = 100;  // of a commit that went back to former versions
  gain.Count({segment, false}, rows.segments);
  CHECK(gain.bytes() == 0);
  const std::int64_t second = BytesOfCopies(*segment, 100);
  segment->live = 0;
  gain.Count({segment, true}, rows.segments);
  const std::int64_t won = BytesOf(*segment) - first - second - BytesOfCopies(*segment, 200);
  CHECK(gain.bytes() == won);
  // The copies were subtracted, so another segment of this number is a new one.
  gain.Count({rows.Add(1, 300, 0), false}, rows.segments);
  CHECK(gain.bytes() == won + BytesOf(*segment) - first);
}

// The second part may come after a commit that no longer needs the rows.
void CopyTheRestOfACommit() {
  Rows rows;
  GainCount gain;
  const SegmentPtr segment = rows.Add(1, 800, 200);
  gain.Count({segment, false}, rows.segments);
  const std::int64_t first = BytesOfCopies(*segment, 800);
  segment->live = 10;
  segment->kept = 0;
  gain.Count({segment, false}, rows.segments);
  CHECK(gain.bytes() == BytesOf(*segment) - first - BytesOfCopies(*segment, 10));
}

// Segments whose rows are all needed win nothing, in two parts neither: the count falls to zero, so there is
// a last renewal.
void RenewingEnds() {
  Rows rows;
  GainCount gain;
  gain.Reset(4096);
  std::uint32_t copied = 0;
  for (std::uint32_t number = 1; gain.bytes() > 0; ++number) {
    CHECK(++copied < 10000);
    const SegmentPtr segment = rows.Add(number, kSlots / 2, kSlots / 2);
    gain.Count({segment, false}, rows.segments);
    segment->live = 0;
    gain.Count({segment, true}, rows.segments);
    rows.segments.clear();
  }
}

// When many segments are gone the count forgets their copies, and the copies of no other segment.
void ForgetSegmentsThatAreGone() {
  Rows rows;
  GainCount gain;
  const SegmentPtr stays = rows.Add(1, 300, 200);
  gain.Count({stays, false}, rows.segments);
  for (std::uint32_t number = 2; number < 40; ++number)
    gain.Count({rows.Make(number, 300, 200), false}, rows.segments);
  CHECK(gain.bytes() == 0);
  const std::int64_t first = BytesOfCopies(*stays, 300);
  stays->live = 0;
  gain.Count({stays, true}, rows.segments);
  std::int64_t won = BytesOf(*stays) - first - BytesOfCopies(*stays, 200);
  CHECK(gain.bytes() == won);
  const SegmentPtr gone = rows.Make(2, 0, 200);
  gain.Count({gone, true}, rows.segments);
  won += BytesOf(*gone) - BytesOfCopies(*gone, 200);
  CHECK(gain.bytes() == won);
}

}  // namespace

int main() {
  CopyAtOnce();
  CopyInParts();
  CopyTheRestOfACommit();
  RenewingEnds();
  ForgetSegmentsThatAreGone();
  return 0;
}
