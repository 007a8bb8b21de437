// Verifies one segment: its header, every record, the zeros between the records, and the footer.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "io/aligned_buffer.h"
#include "io/env.h"
#include "store/footer.h"
#include "store/format.h"
#include "store/verify.h"

namespace tierstore {

// The part of a segment that the kept commits name.
struct NamedSegment {
  std::uint32_t number = 0;
  std::uint32_t slots = 0;                                       // the most that a commit names
  bool sealed = false;                                           // a commit names the full segment
  std::vector<std::pair<std::uint64_t, std::uint32_t>> commits;  // id, slots
};

struct VerifyContext {
  Env& env;
  const std::string& directory;
  StoreId store{};
  std::uint32_t next_segment = 0;
  const std::map<std::uint32_t, std::uint32_t>& row_bytes;  // by table; empty: not known
  VerifyReport& report;
  std::function<void(std::uint64_t)> advance;  // called with the number of further bytes read

  void Add(Finding finding) const;
  // Adds the findings and counts of a segment.
  void Merge(VerifyReport part) const;
};

class SegmentVerifier {
 public:
  static constexpr std::size_t kStretchBytes = 4 << 20;  // read at once; at least a frame

  // Called with each intact record that is no void.
  using Visit = std::function<void(std::uint32_t row_bytes, std::uint32_t slot, std::uint64_t key)>;

  SegmentVerifier(const VerifyContext& context, const NamedSegment& named, const Visit& visit)
      : context_(context), named_(named), visit_(visit), buffer_(kSegmentHeaderBytes) {}

  // Returns whether the whole segment is intact.
  bool Verify();

 private:
  bool OpenAndReadHeader();
  void VerifyRecords();
  void VerifyChunk(std::uint32_t first, std::uint32_t last, std::size_t got);
  const char* CheckRecord(std::uint32_t slot, const std::byte* record);
  void VerifyGap(std::uint64_t begin, std::uint64_t end, const std::byte* data);
  void VerifyEndOfLastBlock(const std::byte* data, std::uint64_t begin);
  void VerifyFooter();
  Bytes ReadAt(std::uint64_t offset, std::size_t size);
  // Notes the record for the footer that a segment without a valid footer should have.
  void CompareFooter(std::uint32_t slot, const RecordHeader& record);

  void Damaged(std::uint32_t slot, const char* why);
  void FlushDamaged();
  Finding Describe(std::uint64_t offset, std::uint64_t bytes, std::string what, std::uint32_t slot,
                   bool lost) const;
  void Harmless(std::uint64_t offset, std::uint64_t bytes, std::string what);

  const VerifyContext& context_;
  const NamedSegment& named_;
  const Visit& visit_;
  AlignedBuffer buffer_;
  std::unique_ptr<File> file_;
  std::uint64_t file_bytes_ = 0;
  SegmentHeader header_;
  Geometry geometry_;
  std::uint32_t crc_prefix_ = 0;
  std::optional<Footer> footer_;
  std::uint32_t footer_version_ = kFooterVersion;
  Footer expected_;                                      // by the records, where none could be loaded
  std::uint32_t damaged_first_ = 0, damaged_count_ = 0;  // a run of slots
  const char* damaged_why_ = nullptr;
  bool footer_differs_ = false;
  bool intact_ = true;
};

}  // namespace tierstore
