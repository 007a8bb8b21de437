// Bindings of the store and of what it stands on, compiled as one file (rows_unit.cc).
#include "bindings/env.cc"
#include "bindings/fork.cc"
#include "bindings/long_call.cc"
#include "bindings/module.cc"
#include "bindings/store.cc"
#include "bindings/verify.cc"
