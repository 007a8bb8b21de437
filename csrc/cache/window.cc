#include "cache/window.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "cache/policy.h"
#include "common/key.h"

namespace tierstore {
namespace {
constexpr std::uint64_t MakeEntry(std::uint32_t ordinal, std::size_t index) {
  return std::uint64_t{ordinal} << 32 | static_cast<std::uint32_t>(index);
}
}  // namespace

Window::Pending* Window::Lookup(std::uint64_t entry) {
  const std::uint32_t offset = static_cast<std::uint32_t>(entry >> 32) - first_ordinal_;
  return offset < pending_.size() ? &pending_[offset] : nullptr;
}

const std::uint64_t* Window::KeyOf(std::uint64_t entry) {
  Pending* pending = Lookup(entry);
  return pending == nullptr ? nullptr : &pending->batch->unique[static_cast<std::uint32_t>(entry)];
}

void Window::Rebuild(std::int64_t extra) {
  const auto wanted =
      std::bit_ceil(static_cast<std::size_t>(std::max<std::int64_t>(1024, (live_ + extra) * 2)));
  std::vector<std::uint64_t> old(wanted, kEmpty);
  old.swap(entries_);
  used_ = 0;
  for (const std::uint64_t entry : old) {
    if (entry == kEmpty) continue;
    const std::uint64_t* key = KeyOf(entry);
    if (key == nullptr) continue;
    std::size_t at = HashKey(*key) & (wanted - 1);
    while (entries_[at] != kEmpty) at = (at + 1) & (wanted - 1);
    entries_[at] = entry;
    ++used_;
  }
}

std::vector<std::uint64_t> Window::Announce(std::int64_t seq, std::shared_ptr<const Batch> batch) {
  if (!pending_.empty() && pending_.back().seq >= seq)
    throw std::logic_error("window: sequence does not increase");
  const PageVector<std::uint64_t>& keys = batch->unique;
  const auto added = static_cast<std::int64_t>(keys.size());
  // At most 5/8 full, dead entries included, so that probe runs stay short and always end.
  if ((used_ + added) * 8 > static_cast<std::int64_t>(entries_.size()) * 5) Rebuild(added);
  const std::uint32_t ordinal = first_ordinal_ + static_cast<std::uint32_t>(pending_.size());
  pending_.push_back({seq, batch, PageVector<std::int32_t>(keys.size(), 0), added});

  constexpr std::size_t kBlock = 32;
  const std::size_t mask = entries_.size() - 1;
  std::vector<std::uint64_t> first_seen;
  std::size_t homes[kBlock];
  for (std::size_t begin = 0; begin < keys.size(); begin += kBlock) {
    const std::size_t count = std::min(kBlock, keys.size() - begin);
    for (std::size_t i = 0; i < count; ++i) {
      homes[i] = HashKey(keys[begin + i]) & mask;
      __builtin_prefetch(&entries_[homes[i]], 1);
    }
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t entry = entries_[homes[i]];
      Pending* earlier = entry == kEmpty ? nullptr : Lookup(entry);
      if (earlier == nullptr) continue;
      __builtin_prefetch(&earlier->batch->unique[static_cast<std::uint32_t>(entry)]);
      __builtin_prefetch(&earlier->next[static_cast<std::uint32_t>(entry)], 1);
    }
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t key = keys[begin + i];
      std::size_t at = homes[i];
      for (; entries_[at] != kEmpty; at = (at + 1) & mask) {
        const std::uint64_t* held = KeyOf(entries_[at]);
        if (held != nullptr && *held == key) break;
      }
      if (entries_[at] == kEmpty) {
        first_seen.push_back(key);
        ++used_;
        ++live_;
      } else {
        Pending* earlier = Lookup(entries_[at]);
        const auto index = static_cast<std::uint32_t>(entries_[at]);
        earlier->next[index] =
            static_cast<std::int32_t>(ordinal - static_cast<std::uint32_t>(entries_[at] >> 32));
        --earlier->latest;
      }
      entries_[at] = MakeEntry(ordinal, begin + i);
    }
  }
  return first_seen;
}

std::vector<std::int64_t> Window::Take(std::int64_t seq) {
  if (pending_.empty() || pending_.front().seq != seq) throw std::logic_error("window: taken out of order");
  const Pending& front = pending_.front();
  std::vector<std::int64_t> next_use(front.next.size());
  for (std::size_t i = 0; i < next_use.size(); ++i) {
    next_use[i] = front.next[i] == 0 ? kNotKnown : pending_[static_cast<std::size_t>(front.next[i])].seq;
  }
  live_ -= front.latest;  // its entries are dead from now on: their ordinal is out of range
  pending_.pop_front();
  ++first_ordinal_;
  return next_use;
}

std::vector<std::uint64_t> Window::Clear() {
  std::vector<std::uint64_t> keys;
  for (const std::uint64_t entry : entries_) {
    const std::uint64_t* key = entry == kEmpty ? nullptr : KeyOf(entry);
    if (key != nullptr) keys.push_back(*key);
  }
  first_ordinal_ += static_cast<std::uint32_t>(pending_.size());
  pending_.clear();
  entries_.assign(entries_.size(), kEmpty);
  used_ = live_ = 0;
  return keys;
}

std::int64_t Window::memory_bytes() const {
  std::int64_t bytes = static_cast<std::int64_t>(entries_.size() * sizeof(std::uint64_t));
  for (const Pending& pending : pending_) {
    bytes += static_cast<std::int64_t>(pending.batch->unique.size() *
                                           (sizeof(std::uint64_t) + sizeof(std::int32_t)) +
                                       pending.batch->inverse.size() * sizeof(std::int32_t));
  }
  return bytes;
}

}  // namespace tierstore
