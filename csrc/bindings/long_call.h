// Long calls without the GIL. The main thread goes on handling Python's signals meanwhile: the call runs in a
// thread of its own, so a signal handler may use the store, too. When a handler raises, the call is ended at
// its next check (common/call_limit.h) and the handler's exception is thrown.
#pragma once

#include <functional>

namespace tierstore {

// For calls that usually take longer than starting a thread.
void RunLong(const std::function<void()>& call);
// For calls that are usually short: begins in this thread and, if that takes too long, begins anew as
// RunLong. `call` must not repeat work that it did before it ended.
void RunShort(const std::function<void()>& call);

}  // namespace tierstore
