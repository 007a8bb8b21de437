#include "cache/sweep.h"

#include <algorithm>
#include <cmath>

namespace tierstore {

Sweep::Sweep() : buckets_(kBuckets) {}

std::size_t Sweep::BucketAt(std::size_t n) const {
  if (shift_ == 0) return n;  // few places
  std::size_t stretch = 0;
  for (std::size_t bit = 1, last = kBuckets / kStretch / 2; last > 0; bit <<= 1, last >>= 1) {
    if ((n / kStretch & bit) != 0) stretch |= last;
  }
  return stretch * kStretch + n % kStretch;
}

void Sweep::MakeWider(std::uint64_t place) {
  while (place >> shift_ >= kBuckets) {
    for (std::size_t b = 0; b < used_; ++b) {
      Bucket& from = buckets_[b];
      Bucket& to = buckets_[b / 2];
      if (&from == &to) continue;
      if (to.empty()) {
        to.swap(from);
      } else {
        to.insert(to.end(), from.begin(), from.end());
        from.clear();
      }
    }
    at_ = at_ * kBuckets / Visits();  // the part of the round that has begun stays
    used_ = (used_ + 1) / 2;
    done_ = 0;
    ++shift_;
  }
}

void Sweep::Add(const std::uint64_t* keys, const std::uint64_t* places, const std::int64_t* seqs,
                std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (places[i] == kNowhere) continue;
    if (places[i] >> shift_ >= kBuckets) MakeWider(places[i]);
    const auto bucket = static_cast<std::size_t>(places[i] >> shift_);
    used_ = std::max(used_, bucket + 1);
    buckets_[bucket].push_back({static_cast<std::uint32_t>(keys[i]),
                                static_cast<std::uint32_t>(keys[i] >> 32),
                                static_cast<std::uint32_t>(seqs[i])});
    ++size_;
  }
}

std::int64_t Sweep::Next(double way, std::int64_t limit, std::int64_t first, std::int64_t last,
                         PageVector<std::uint64_t>* keys) {
  std::int64_t earliest = last + 1;
  auto left = static_cast<std::int64_t>(std::ceil(std::min(way, 1.0) * static_cast<double>(Visits())));
  for (; left > 0; --left) {
    Bucket& bucket = buckets_[BucketAt(at_)];
    std::size_t kept = done_, i = done_;
    for (; i < bucket.size() && limit > 0; ++i) {
      const Entry entry = bucket[i];
      const std::int32_t after = entry.After(first);
      if (after > last - first) {
        bucket[kept++] = entry;
      } else if (after >= 0) {
        keys->push_back(entry.key());
        earliest = std::min(earliest, first + after);
        --limit;
      }
    }
    size_ -= static_cast<std::int64_t>(i - kept);
    bucket.erase(bucket.begin() + static_cast<std::ptrdiff_t>(kept),
                 bucket.begin() + static_cast<std::ptrdiff_t>(i));
    if (kept < bucket.size()) {  // the limit is reached
      done_ = kept;
      break;
    }
    done_ = 0;
    if (++at_ >= Visits()) {
      at_ = 0;
      ++rounds_;
    }
  }
  return earliest;
}

}  // namespace tierstore
