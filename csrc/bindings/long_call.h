// Calls without the GIL that may take long. On the main thread, where Python handles signals, it goes on
// handling them meanwhile: the call runs in a thread of its own, so a handler may use the store, too. When a
// handler raises, the call is ended at its next check (common/call_limit.h) and the handler's exception is
// thrown.
#pragma once

#include <functional>

namespace tierstore {

// For calls that as a rule take longer than starting a thread does.
void RunLong(const std::function<void()>& call);
// For calls that as a rule are short: begins here and, where that takes too long, begins anew as RunLong.
// What `call` did before it ended must not be done twice.
void RunShort(const std::function<void()>& call);

}  // namespace tierstore
