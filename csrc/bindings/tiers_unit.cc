// Bindings of tiers and of lookups in them, compiled as one file (rows_unit.cc).
#include "bindings/keyed.cc"
#include "bindings/shared_offsets.cc"
#include "bindings/slot_marks.cc"
#include "bindings/tier.cc"

// Their signatures name a Tier, and each other's classes, which must have been bound before.
#include "bindings/resident_lookups.cc"
#include "bindings/tier_forward.cc"
#include "bindings/uses.cc"
