#include "cache/window.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "cache/policy.h"
#include "common/key.h"

namespace tierstore {
namespace {
// So many accesses to memory are begun before the first of them is waited for.
constexpr std::size_t kBlock = 32;
}  // namespace

std::size_t Window::Home(std::uint64_t key) const {
  return HomePlace(static_cast<std::uint32_t>(HashKey(key) >> 32), entries_.size());
}

void Window::Rebuild(std::int64_t extra) {
  const auto wanted = static_cast<std::size_t>(std::max<std::int64_t>(1024, (live_ + extra) * 5 / 3));
  const auto add = [this](const Entry& entry) {
    std::size_t at = Home(entry.key);
    while (entries_[at].index != kEmpty) at = Next(at);
    entries_[at] = entry;
  };
  const auto is_live = [this](const Entry& entry) { return entry.index != kEmpty && IsLive(entry); };
  if (wanted <= entries_.size() && entries_.size() < 2 * wanted) {  // as a rule: its pages are there
    PageVector<Entry> live;
    live.reserve(static_cast<std::size_t>(live_));
    std::copy_if(entries_.begin(), entries_.end(), std::back_inserter(live), is_live);
    entries_.Fill(Entry{});
    for (const Entry& entry : live) add(entry);
  } else {
    const OwnArray<Entry> old = std::exchange(entries_, OwnArray<Entry>(wanted + wanted / 16, Entry{}));
    for (const Entry& entry : old) {
      if (is_live(entry)) add(entry);
    }
  }
  used_ = live_;
}

PageVector<std::uint64_t> Window::Announce(std::int64_t seq, std::shared_ptr<const Batch> batch) {
  if (!pending_.empty() && pending_.back().seq >= seq)
    throw std::logic_error("window: sequence does not increase");
  const PageVector<std::uint64_t>& keys = batch->unique;
  const auto added = static_cast<std::int64_t>(keys.size());
  // At most 3/4 full, dead entries included, so that probe runs stay short and always end.
  if ((used_ + added) * 4 > static_cast<std::int64_t>(entries_.size()) * 3) Rebuild(added);
  std::vector<Pending*> lookups;  // a deque takes long to find its elements
  lookups.reserve(pending_.size());
  for (Pending& pending : pending_) lookups.push_back(&pending);
  const std::size_t count = lookups.size();
  const std::uint32_t first = first_ordinal_, ordinal = first + static_cast<std::uint32_t>(count);
  pending_.push_back({seq, batch, PageVector<std::int32_t>(keys.size()), added});

  PageVector<std::uint64_t> first_seen;
  first_seen.reserve(keys.size());
  Entry* const entries = entries_.data();
  std::size_t homes[kBlock];
  for (std::size_t begin = 0; begin < keys.size(); begin += kBlock) {
    const std::size_t n = std::min(kBlock, keys.size() - begin);
    for (std::size_t i = 0; i < n; ++i) {
      homes[i] = Home(keys[begin + i]);
      __builtin_prefetch(&entries[homes[i]], 1);
    }
    for (std::size_t i = 0; i < n; ++i) {
      const Entry& entry = entries[homes[i]];
      const std::uint32_t lookup = entry.ordinal - first;
      if (lookup < count && entry.index != kEmpty) __builtin_prefetch(&lookups[lookup]->next[entry.index], 1);
    }
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint64_t key = keys[begin + i];
      Entry* dead = nullptr;
      Entry* entry = &entries[homes[i]];
      while (entry->index != kEmpty && entry->key != key) {
        if (dead == nullptr && entry->ordinal - first > count) dead = entry;
        entry = &entries[Next(static_cast<std::size_t>(entry - entries))];
      }
      const std::uint32_t lookup = entry->ordinal - first;
      if (entry->index != kEmpty && lookup < count) {
        lookups[lookup]->next[entry->index] = static_cast<std::int32_t>(ordinal - entry->ordinal);
        --lookups[lookup]->latest;
      } else {
        first_seen.push_back(key);
        ++live_;
        if (entry->index == kEmpty) {
          if (dead != nullptr)
            entry = dead;
          else
            ++used_;
        }
      }
      *entry = {key, ordinal, static_cast<std::uint32_t>(begin + i)};
    }
  }
  return first_seen;
}

PageVector<std::int64_t> Window::Take(std::int64_t seq) {
  if (pending_.empty() || pending_.front().seq != seq) throw std::logic_error("window: taken out of order");
  const Pending& front = pending_.front();
  std::vector<std::int64_t> uses;  // by how many lookups later
  uses.reserve(pending_.size());
  for (const Pending& pending : pending_) uses.push_back(pending.seq);
  uses[0] = kNotKnown;
  PageVector<std::int64_t> next_use;
  next_use.reserve(front.next.size());
  for (const std::int32_t later : front.next) next_use.push_back(uses[static_cast<std::size_t>(later)]);
  live_ -= front.latest;  // its entries are dead from now on: their ordinal is out of range
  pending_.pop_front();
  ++first_ordinal_;
  return next_use;
}

PageVector<std::uint64_t> Window::Clear() {
  PageVector<std::uint64_t> keys;
  for (const Entry& entry : entries_) {
    if (entry.index != kEmpty && IsLive(entry)) keys.push_back(entry.key);
  }
  std::sort(keys.begin(), keys.end());  // not in the order of hashes, which differs from process to process
  first_ordinal_ += static_cast<std::uint32_t>(pending_.size());
  pending_.clear();
  entries_.Fill(Entry{});
  used_ = live_ = 0;
  return keys;
}

std::int64_t Window::memory_bytes() const {
  std::int64_t bytes = static_cast<std::int64_t>(entries_.size() * sizeof(Entry));
  for (const Pending& pending : pending_) {
    bytes += static_cast<std::int64_t>(pending.batch->unique.size() *
                                           (sizeof(std::uint64_t) + sizeof(std::int32_t)) +
                                       pending.batch->inverse.size() * sizeof(std::int32_t));
  }
  return bytes;
}

}  // namespace tierstore
