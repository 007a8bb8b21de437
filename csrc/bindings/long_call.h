// Runs long calls without the GIL. The main thread goes on handling Python's signals meanwhile: the call runs
// in a thread of its own, so a signal handler may use the store, too. When a handler raises, the call ends at
// its next check (common/call_limit.h) and the handler's exception is thrown.
#pragma once

#include <functional>

namespace tierstore {

// Runs a call that usually takes longer than starting a thread.
void RunLong(const std::function<void()>& call);
// Runs a call that is usually short: begins the call in this thread and, if the call takes too long, ends the
// call and begins it anew by RunLong. `call` must not repeat work that it did before it was ended.
void RunShort(const std::function<void()>& call);

}  // namespace tierstore
