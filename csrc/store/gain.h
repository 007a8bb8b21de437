// Counts the bytes that compaction has won since the last commit was renewed, less the bytes of the copies
// that compaction wrote. The last commit is renewed only while the count is above zero, so that renewing and
// compacting come to an end.
//
// Guarded by the store's mutex (store/store_mutex.h).
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>

#include "store/victims.h"

namespace tierstore {

class GainCount {
 public:
  std::int64_t bytes() const { return bytes_; }
  // Begins anew with this number, below zero where bytes must be won first.
  void Reset(std::int64_t bytes) { bytes_ = bytes; }
  void Subtract(std::uint64_t bytes) { bytes_ -= static_cast<std::int64_t>(bytes); }
  // Counts the victim's bytes and the copies of its rows that are left; call it before the rows are copied.
  //
  // A segment that still has rows which only the last commit needs stays when its other rows are copied, so
  // its bytes are won when the rows that the commit needs are copied, too. The bytes of the first copies are
  // subtracted at that time: else a segment that is copied in two parts would seem to win the same bytes
  // twice, and renewing and compacting could go on for ever. `segments` are all segments by number: the count
  // forgets the copies of other segments.
  void Count(const Victim& victim, const std::map<std::uint32_t, SegmentPtr>& segments);

 private:
  std::int64_t bytes_ = 0;
  std::unordered_map<std::uint32_t, std::uint64_t> copied_bytes_;  // by the number of a segment that stayed
};

}  // namespace tierstore
