#include "store/verify_segment.h"

#include <algorithm>

#include "common/key.h"
#include "io/errors.h"
#include "store/errors.h"
#include "store/manifest.h"

namespace tierstore {
namespace {

bool IsZero(const std::byte* data, std::size_t size) {
  return std::all_of(data, data + size, [](std::byte byte) { return byte == std::byte{0}; });
}

// Returns whether most of the bytes that are not zero in `expected` are in `found`, too.
bool IsMostly(const Bytes& found, const Bytes& expected) {
  std::size_t total = 0, same = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] == std::byte{0}) continue;
    ++total;
    same += found[i] == expected[i];
  }
  return 2 * same >= total;
}

}  // namespace

void VerifyContext::Add(Finding finding) const {
  ++report.findings_total;
  if (report.findings.size() < VerifyReport::kMaxFindings) report.findings.push_back(std::move(finding));
}

void VerifyContext::Merge(VerifyReport part) const {
  const std::uint64_t beyond = part.findings_total - part.findings.size();
  for (Finding& finding : part.findings) Add(std::move(finding));
  report.findings_total += beyond;
  report.records += part.records;
  report.voids += part.voids;
  report.index_entries += part.index_entries;
}

bool SegmentVerifier::Verify() try {
  if (!OpenAndReadHeader()) return false;
  footer_ = Footer::Load(*file_, header_, &footer_version_);
  if (footer_ && footer_->keys.size() < named_.slots) footer_.reset();
  if (!footer_) {
    expected_.keys.resize(named_.slots);
    if (header_.relocated) expected_.epochs.resize(named_.slots);
  }
  VerifyRecords();
  FlushDamaged();
  VerifyFooter();
  return intact_;
} catch (const IoError& error) {
  context_.Add(Describe(0, file_bytes_, error.what(), 0, true));
  return false;
}

bool SegmentVerifier::OpenAndReadHeader() {
  const std::string path = context_.directory + "/" + SegmentName(named_.number);
  try {
    if (!context_.env.Exists(path)) {
      context_.Add(Describe(0, 0, "the segment is missing", 0, true));
      return false;
    }
    file_ = context_.env.Open(path, OpenMode::kRead, true);
    file_bytes_ = file_->Size();
    const std::size_t got = file_->Read(0, buffer_.data(), kSegmentHeaderBytes);
    context_.advance(got);
    header_ = SegmentHeader::Decode({buffer_.data(), got}, SegmentName(named_.number));
  } catch (const CorruptError& error) {
    context_.Add(Describe(0, kSegmentHeaderBytes, error.what(), 0, true));
    return false;
  } catch (const IoError& error) {
    context_.Add(Describe(0, kSegmentHeaderBytes, error.what(), 0, true));
    return false;
  }
  if (header_.store != context_.store || header_.number != named_.number) {
    context_.Add(
        Describe(0, kSegmentHeaderBytes, "the file belongs to another store or is another segment", 0, true));
    return false;
  }
  const std::size_t used = 8 + 6 * 4 + header_.store.size() + 4;
  VerifyGap(used, kSegmentHeaderBytes, buffer_.data() + used);
  geometry_ = Geometry::For(header_.row_bytes);
  buffer_ = AlignedBuffer(std::min<std::uint64_t>(kStretchBytes, geometry_.EndOffset(named_.slots)));
  crc_prefix_ = RecordCrcPrefix(header_.store, header_.number);
  return true;
}

void SegmentVerifier::VerifyRecords() {
  const std::uint32_t per_chunk =
      static_cast<std::uint32_t>(kStretchBytes / geometry_.frame_bytes) * geometry_.records_per_frame;
  for (std::uint32_t first = 0; first < named_.slots; first += per_chunk) {
    const std::uint32_t last = std::min(named_.slots, first + per_chunk);
    const std::uint64_t offset = geometry_.Offset(first);
    const std::uint64_t end = last == named_.slots ? geometry_.EndOffset(last) : geometry_.Offset(last);
    std::size_t got = 0;
    try {
      got = file_->Read(offset, buffer_.data(), end - offset);
    } catch (const IoError& error) {
      FlushDamaged();
      intact_ = false;
      context_.Add(Describe(offset, end - offset, error.what(), first, true));
      continue;
    }
    context_.advance(got);
    VerifyChunk(first, last, got);
  }
}

void SegmentVerifier::VerifyChunk(std::uint32_t first, std::uint32_t last, std::size_t got) {
  const std::uint64_t offset = geometry_.Offset(first);
  for (std::uint32_t slot = first; slot < last; ++slot) {
    const std::uint64_t at = geometry_.Offset(slot) - offset;
    const std::byte* record = buffer_.data() + at;
    const char* why =
        at + geometry_.record_bytes > got ? "the file ends before its end" : CheckRecord(slot, record);
    if (why != nullptr) {
      Damaged(slot, why);
      continue;
    }
    const bool ends_frame = (slot + 1) % geometry_.records_per_frame == 0;
    const std::uint64_t next = geometry_.Offset(slot + 1) - offset;
    if (ends_frame && next <= got) {
      VerifyGap(offset + at + geometry_.record_bytes, offset + next, record + geometry_.record_bytes);
    }
  }
  if (last == named_.slots) {
    const std::uint64_t begin = geometry_.Offset(last - 1) + geometry_.record_bytes;
    if (geometry_.EndOffset(last) <= offset + got)
      VerifyEndOfLastBlock(buffer_.data(), offset);
    else if (begin <= offset + got)
      Damaged(last - 1, "the file ends within the record's block");
  }
}

// Returns why a record is damaged, or nullptr.
const char* SegmentVerifier::CheckRecord(std::uint32_t slot, const std::byte* data) {
  if (!RecordIsIntact(data, slot, geometry_, crc_prefix_)) return "checksum mismatch";
  const RecordHeader record = LoadRecordHeader(data);
  CompareFooter(slot, record);
  if (record.epoch == 0) {
    if (record.key != 0 || !IsZero(data + sizeof record, geometry_.record_bytes - sizeof record))
      return "the record is a void that holds data";
    ++context_.report.voids;
    return nullptr;
  }
  if (header_.relocated ? record.epoch >= context_.next_segment : record.epoch != header_.number)
    return "the record has an impossible epoch";
  if (!context_.row_bytes.empty()) {
    const auto table = context_.row_bytes.find(KeyTable(record.key));
    if (table == context_.row_bytes.end()) return "the record is of a table that the store does not have";
    if (table->second != header_.row_bytes) return "the record is of a table with other row_bytes";
  }
  ++context_.report.records;
  visit_(header_.row_bytes, slot, record.key);
  return nullptr;
}

void SegmentVerifier::VerifyGap(std::uint64_t begin, std::uint64_t end, const std::byte* data) {
  if (!IsZero(data, end - begin)) Harmless(begin, end - begin, "unused bytes that should be zero are not");
}

// Records that begin in the last committed block, behind the last committed record, are voids or were never
// written. The end of the block may cut them off.
void SegmentVerifier::VerifyEndOfLastBlock(const std::byte* data, std::uint64_t begin) {
  const std::uint64_t end = geometry_.EndOffset(named_.slots);
  std::uint64_t at = geometry_.Offset(named_.slots - 1) + geometry_.record_bytes;
  std::vector<std::byte> expected(geometry_.record_bytes);
  constexpr std::uint64_t kNoKey = 0;
  constexpr std::uint32_t kNoEpoch = 0;
  for (std::uint32_t slot = named_.slots; at < end; ++slot) {
    const std::uint64_t start = std::min(geometry_.Offset(slot), end);
    if (start > at) VerifyGap(at, start, data + (at - begin));
    if (start == end) return;
    const std::uint64_t size = std::min<std::uint64_t>(geometry_.record_bytes, end - start);
    std::fill(expected.begin(), expected.end(), std::byte{0});
    std::byte* record = expected.data();
    SealRecords(&record, &kNoKey, &kNoEpoch, slot, 1, geometry_, crc_prefix_);
    const std::byte* found = data + (start - begin);
    if (std::memcmp(found, expected.data(), size) != 0 && !IsZero(found, size))
      Harmless(start, size, "a void is damaged");
    at = start + size;
  }
}

void SegmentVerifier::CompareFooter(std::uint32_t slot, const RecordHeader& record) {
  if (!footer_) {
    expected_.keys[slot] = record.key;
    if (header_.relocated) expected_.epochs[slot] = record.epoch;
    if (record.epoch == 0) expected_.voids.push_back(slot);
    return;
  }
  const bool is_void = std::binary_search(footer_->voids.begin(), footer_->voids.end(), slot);
  const bool same = footer_->keys[slot] == record.key && is_void == (record.epoch == 0) &&
                    (!header_.relocated || footer_->epochs[slot] == record.epoch);
  footer_differs_ = footer_differs_ || !same;
}

void SegmentVerifier::VerifyFooter() {
  const std::uint64_t end = geometry_.EndOffset(named_.slots);
  if (file_bytes_ <= end) return;
  if (footer_) {
    const auto slots = static_cast<std::uint32_t>(footer_->keys.size());
    const std::uint64_t begin = geometry_.EndOffset(slots);
    context_.advance(file_bytes_ - begin);
    if (footer_differs_) {
      intact_ = false;
      context_.Add(Describe(begin, file_bytes_ - begin, "the footer contradicts the records", 0, true));
    }
    const Bytes expected = footer_->Encode(header_, footer_version_);
    if (ReadAt(begin, expected.size()) != expected)
      Harmless(begin, expected.size(), "unused bytes of the footer that should be zero are not");
    return;
  }
  // Behind the committed slots there is a footer, or bytes of the same size that were never committed.
  for (std::uint32_t version = kOldestFooterVersion; version <= kFooterVersion; ++version) {
    const Bytes expected = expected_.Encode(header_, version);
    if (!named_.sealed || file_bytes_ - end != expected.size()) continue;
    const Bytes found = ReadAt(end, expected.size());
    if (found.size() != expected.size() || !IsMostly(found, expected)) continue;
    return Harmless(end, found.size(), "the footer is damaged");
  }
}

// Returns the bytes at `offset`, a block boundary; they are fewer than `size` at the end of the file.
Bytes SegmentVerifier::ReadAt(std::uint64_t offset, std::size_t size) {
  AlignedBuffer buffer(size);
  const std::size_t got = std::min(size, file_->Read(offset, buffer.data(), buffer.size()));
  return {buffer.data(), buffer.data() + got};
}

void SegmentVerifier::Damaged(std::uint32_t slot, const char* why) {
  intact_ = false;
  if (damaged_count_ > 0 && damaged_first_ + damaged_count_ == slot && damaged_why_ == why) {
    ++damaged_count_;
    return;
  }
  FlushDamaged();
  damaged_first_ = slot;
  damaged_count_ = 1;
  damaged_why_ = why;
}

void SegmentVerifier::FlushDamaged() {
  if (damaged_count_ == 0) return;
  const std::uint32_t last = damaged_first_ + damaged_count_ - 1;
  const std::uint64_t offset = geometry_.Offset(damaged_first_);
  const std::string what = damaged_count_ == 1 ? "a record is damaged: "
                                               : std::to_string(damaged_count_) + " records are damaged: ";
  Finding finding = Describe(offset, geometry_.Offset(last) + geometry_.record_bytes - offset,
                             what + damaged_why_, damaged_first_, true);
  if (footer_) {
    for (std::uint32_t slot = damaged_first_; slot <= last; ++slot) {
      if (std::binary_search(footer_->voids.begin(), footer_->voids.end(), slot)) continue;
      const std::uint64_t key = footer_->keys[slot];
      if (finding.keys.size() < VerifyReport::kMaxKeys) finding.keys.push_back(key);
      if (std::find(finding.tables.begin(), finding.tables.end(), KeyTable(key)) == finding.tables.end())
        finding.tables.push_back(KeyTable(key));
    }
  } else {
    for (const auto& [table, row_bytes] : context_.row_bytes) {
      if (row_bytes == header_.row_bytes) finding.tables.push_back(table);
    }
  }
  context_.Add(std::move(finding));
  damaged_count_ = 0;
}

// `slot` is the first slot that the finding is about.
Finding SegmentVerifier::Describe(std::uint64_t offset, std::uint64_t bytes, std::string what,
                                  std::uint32_t slot, bool lost) const {
  Finding finding{SegmentName(named_.number), offset, bytes, std::move(what), lost, {}, {}, {}};
  for (const auto& [commit, slots] : named_.commits) {
    if (slots > slot && lost) finding.commits.push_back(commit);
  }
  return finding;
}

void SegmentVerifier::Harmless(std::uint64_t offset, std::uint64_t bytes, std::string what) {
  context_.Add(Describe(offset, bytes, std::move(what), 0, false));
}

}  // namespace tierstore
