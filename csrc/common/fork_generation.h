// Whether memory is this process's own: large arrays are mapped so that a forked child has no copy of them
// (MADV_DONTFORK). Copies would cost the parent a page for every page that it writes while a child lives.
#pragma once

#include <cstdint>

namespace tierstore {

// How many forks lie between this process and the one that loaded the library. What was mapped under another
// number does not exist here: it must not be read, written or unmapped.
std::uint32_t ForkGeneration();

}  // namespace tierstore
