// Declares a policy's hooks as the tier calls them; docs/design.md has the contract. A null table means that
// no row is ever evicted (the tier holds every row), so there is no policy.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>

namespace tierstore {

inline constexpr std::int64_t kNotKnown = std::numeric_limits<std::int64_t>::max();

struct PolicyHooks {
  using Use = void (*)(void* state, const std::int32_t* slots, const std::uint64_t* keys,
                       const std::int64_t* next_use, std::int64_t n, std::int64_t now);
  using Announce = void (*)(void* state, const std::int32_t* slots, const std::int64_t* next_use,
                            std::int64_t n, std::int64_t now);
  using Remove = void (*)(void* state, const std::int32_t* slots, std::int64_t n);
  using Evict = std::int64_t (*)(void* state, std::int64_t n, const std::int64_t* last_use,
                                 std::int64_t pinned_since, std::int32_t* victims);
  using Admit = void (*)(void* state, const std::uint64_t* keys, std::int64_t n, std::int64_t now,
                         std::uint8_t* admitted);
  void* state = nullptr;
  Use touch = nullptr;
  Use insert = nullptr;
  Announce announce = nullptr;
  Remove remove = nullptr;
  Evict evict = nullptr;
  Admit admit = nullptr;  // optional

  explicit operator bool() const { return evict != nullptr; }
};

// The admission filter says before the policy which missed rows get a slot at all; a null hook admits all.
struct AdmissionHook {
  void* state = nullptr;
  PolicyHooks::Admit admit = nullptr;

  explicit operator bool() const { return admit != nullptr; }
};

// A policy broke the contract, and its answer was undone.
class PolicyFault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace tierstore
