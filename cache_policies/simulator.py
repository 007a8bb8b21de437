"""Simulates the misses of a policy on a trace: the live engine's plans without the rows.

Batch ``i`` is plan ``i``. Before it, the window announces the batches up to ``i + window``; then hits are
touched, misses take free slots (lowest first) and after these the victims of ``evict``, and are inserted in
order of first occurrence. Rows used since plan ``i - depth`` are pinned; if that leaves too few victims the
depth shrinks for this plan, and if batch ``i`` alone does not fit, its last misses overflow: they use
transient overflow slots and are not resident afterwards. The simulator runs the live engine's hooks.

A large cache has lanes (``cache_policies.lanes``): each is simulated by itself, with the rows that it holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cache_policies import registry
from cache_policies.admission import Admission, get_admission
from cache_policies.disk_cache import compiled
from cache_policies.errors import PolicyError
from cache_policies.inner import inlined
from cache_policies.lanes import lane_slots, lanes_of
from cache_policies.native import call_int64, call_void
from cache_policies.policy import UNKNOWN, Policy
from cache_policies.prepared import NEVER, PreparedTrace, prepare, split
from cache_policies.replay import replay
from cache_policies.simulation import Simulation


def simulate(
    batches: Iterable[np.ndarray] | PreparedTrace,
    policy: str | Policy | type[Policy],
    capacity: int,
    *,
    depth: int = 0,
    window: int | np.ndarray = 0,
    on_demand: int = 0,
    admission: str | Admission = "always",
) -> Simulation:
    """Run ``policy`` with ``capacity`` slots over ``batches`` of keys (1-d integer arrays, or a prepared
    trace).

    ``depth``: how many earlier batches are still in flight; ``window``: how many later ones are known, or an
    array of that by batch (``automatic_windows``); ``on_demand``: how many first batches are planned without
    either (a live prefetch learns from one); ``admission``: a filter, as ``"counter(2)"``. Offline policies,
    and traces of single accesses with nothing in flight, have one lane. Raises ``PolicyError`` for an unknown
    policy, a wrong number, and a policy whose ``evict`` breaks the contract. Releases the GIL.
    """
    trace = prepare(batches)
    policy = registry.get(policy)
    if policy.offline:
        window, on_demand = trace.batches, 0
    windows = _windows(window, trace.batches)
    if min(depth, int(windows.min(initial=0)), on_demand) < 0:
        raise PolicyError(
            f"depth, window and on_demand must not be negative, got {depth}, {window} and {on_demand}"
        )
    least, most = int(windows.min(initial=trace.batches)), int(windows.max(initial=0))
    announces = policy.uses_window and most > 0 and (least < trace.batches or on_demand > 0)
    is_plain = depth == 0 and least == most and get_admission(admission).name == "always"
    if not trace.offsets.size and is_plain:
        return _simulate_single(trace, policy, capacity, most, on_demand, announces)
    setting = depth, windows, on_demand
    counts = _simulate_lanes(trace, policy, capacity, setting, announces, admission)
    return Simulation(policy.name, capacity, trace.batches, trace.accesses, trace.uniques, *counts)


def _windows(window: int | np.ndarray, batches: int) -> np.ndarray:
    """Return the window of each batch."""
    if not isinstance(window, np.ndarray):
        return np.full(batches, window, np.int64)
    known = np.arange(batches) + window if window.shape == (batches,) else np.empty(0)
    if known.size != batches or (np.diff(known) < 0).any():
        raise PolicyError("give a window per batch, and let no batch be forgotten that was known before")
    return window.astype(np.int64)


def _simulate_lanes(
    trace: PreparedTrace,
    policy: Policy,
    capacity: int,
    setting: tuple[int, np.ndarray, int],
    announces: bool,
    admission: str | Admission,
) -> tuple[int, ...]:
    """Return the last fields of a Simulation, summed over the lanes."""
    slots = [capacity] if policy.offline else lane_slots(capacity)
    parts = [trace] if len(slots) == 1 else split(trace, lanes_of(trace.keys, len(slots)), len(slots))
    no_rows, shrunk = np.empty((2, 0), np.int64), np.zeros(trace.batches, np.uint8)
    sums = np.zeros(5, np.int64)
    for part, own in zip(parts, slots, strict=True):
        sums += _simulate_batches(part, policy, own, setting, announces, admission, (no_rows, shrunk))
    return *(int(n) for n in sums), int(shrunk.sum())


def missed_by_row(trace: PreparedTrace, policy: str | Policy | type[Policy], capacity: int) -> np.ndarray:
    """Return the misses and the missed accesses of each row (int64, 2 by rows).

    The figures are as of ``simulate`` for a trace in batches, with neither window nor depth, in one lane.
    """
    missed, shrunk = np.zeros((2, trace.footprint), np.int64), np.zeros(trace.batches, np.uint8)
    setting = 0, np.zeros(trace.batches, np.int64), 0
    _simulate_batches(trace, registry.get(policy), capacity, setting, False, "always", (missed, shrunk))
    return missed


def _simulate_batches(
    trace: PreparedTrace,
    policy: Policy,
    capacity: int,
    setting: tuple[int, np.ndarray, int],
    announces: bool,
    admission: str | Admission,
    marks: tuple[np.ndarray, np.ndarray],
) -> tuple[int, ...]:
    """Return misses, access misses, compulsory, overflowed and refused of one lane.

    ``setting`` is depth, window and on_demand; ``marks`` are arrays that get more (see ``_run``).
    """
    compiled = policy.compile(capacity)
    hooks = compiled.hooks
    gate = get_admission(admission).compile(capacity)
    largest = trace.largest_batch
    counts, fault = _run(
        (trace.rows, trace.uses, trace.next_batch, trace.offsets, trace.keys),
        (compiled.state_address, hooks["announce"], hooks["touch"], hooks["evict"], hooks["insert"]),
        (
            (gate.state_address, 0 if gate.name == "always" else gate.hooks["admit"]),
            (compiled.state_address, hooks.get("admit", 0)),
        ),
        _new_cache(trace.footprint, capacity, announces),
        (_new_slots(largest), _new_slots(largest), np.empty(largest, np.int32), np.empty(largest, np.int32)),
        setting,
        marks,
    )
    if fault:
        raise _broken(policy, counts[0], fault)
    return counts


def _simulate_single(
    trace: PreparedTrace, policy: Policy, capacity: int, window: int, on_demand: int, announces: bool
) -> Simulation:
    """Simulate one access per batch and nothing in flight: the same plans, by a loop made for this case."""
    cache = _new_cache(trace.footprint, capacity, announces)._asdict()
    state = {"rows": trace.rows, "next_batch": trace.next_batch, "keys": trace.keys, **cache}
    counts = replay(policy, policy.compile(capacity), state, window, on_demand)
    if counts["fault"]:
        raise _broken(policy, counts["last_plan"], counts["fault"])
    misses = counts["misses"]
    return Simulation(
        policy.name,
        capacity,
        trace.batches,
        trace.accesses,
        trace.uniques,
        misses,
        misses,
        counts["compulsory"],
        counts["overflowed"],
        counts["refused"],
        0,
    )


def _broken(policy: Policy, plan: int, fault: int) -> PolicyError:
    return PolicyError(f"policy {policy.name!r} broke the contract in plan {plan}: evict {_FAULTS[fault]}")


_FAULTS = {
    1: "returned more slots than it was asked for, or a negative number",
    2: "returned a slot that does not exist",
    3: "returned an empty slot, or one slot twice",
    4: "returned a pinned slot",
}


class _Cache(NamedTuple):
    """The engine's state beside the policy: the row in each slot, and each slot's last use."""

    slot_of: np.ndarray  # int32 per row, -1 if not resident
    row_in: np.ndarray  # int32 per slot, -1 if free
    last_use: np.ndarray  # int64 per slot
    pending: np.ndarray  # int32 per row: the last announced batch with it (empty if nothing is announced)


class _Slots(NamedTuple):
    """Arguments of a hook, filled for each plan."""

    slot: np.ndarray
    key: np.ndarray
    next_use: np.ndarray


def _new_cache(footprint: int, capacity: int, announces: bool) -> _Cache:
    return _Cache(
        np.full(footprint, -1, np.int32),
        np.full(capacity, -1, np.int32),
        np.full(capacity, -1, np.int64),
        np.full(footprint if announces else 0, -1, np.int32),
    )


def _new_slots(n: int) -> _Slots:
    return _Slots(np.empty(n, np.int32), np.empty(n, np.uint64), np.empty(n, np.int64))


@compiled
def _run(trace, hooks, gates, cache, buffers, setting, marks):
    """Run all plans; return ``(figures, fault)``.

    The figures are plan or misses, access misses, compulsory, overflowed, refused. Of ``marks``, the first
    (int64, 2 by rows, or by 0) gets the misses and missed accesses of each row, and the second (uint8 by
    batches) a 1 for every plan that could not keep the full depth.
    """
    rows, uses, next_batch, offsets, keys = trace
    depth, windows, on_demand = setting
    state, announce, touch, evict, insert = hooks
    hit, miss, missed, victims = buffers
    missed_of, shrunk = marks
    batches = offsets.size - 1 if offsets.size else rows.size
    announces = cache.pending.size > 0
    used, seen, announced = 0, 0, on_demand
    misses, access_misses, compulsory, overflowed, refused = 0, 0, 0, 0, 0
    admitted = np.empty(missed.size, np.uint8)
    for i in range(batches):
        window = windows[i]
        while announces and i >= on_demand and announced <= i + window and announced < batches:
            first, last = _bounds(offsets, announced)
            n = _announced(rows[first:last], i, announced, cache, hit)
            if n:
                call_void(announce, (state, hit.slot.ctypes.data, hit.next_use.ctypes.data, n, i))
            announced += 1
        known = i + window if i >= on_demand else i
        first, last = _bounds(offsets, i)
        hits = _split(rows[first:last], next_batch[first:last], keys, i, known, cache, hit, miss, missed)
        lacking = last - first - hits
        if hits:
            _notify(touch, state, hit, hits, i)
        if lacking == 0:
            continue
        misses += lacking
        access_misses += _missed_accesses(rows[first:last], uses[first:last], missed, lacking, missed_of)
        for row in missed[:lacking]:  # rows are numbered by first use
            if row >= seen:
                compulsory += 1
                seen = row + 1
        kept = _admitted(gates, lacking, i, miss, missed, admitted)
        refused += lacking - kept
        lacking = kept
        free = min(lacking, cache.row_in.size - used)
        pinned = min(i, max(i - depth, on_demand))
        got, since, fault = _make_room(evict, state, lacking - free, pinned, i, cache, victims)
        if fault:
            return (i, 0, 0, 0, 0), fault
        shrunk[i] |= since > pinned
        for k in range(free + got):
            slot = used + k if k < free else victims[k - free]
            miss.slot[k] = slot
            cache.row_in[slot] = missed[k]
            cache.slot_of[missed[k]] = slot
            cache.last_use[slot] = i
        used += free
        overflowed += lacking - free - got
        if free + got:
            _notify(insert, state, miss, free + got, i)
    return (misses, access_misses, compulsory, overflowed, refused), 0


@inlined
def _bounds(offsets, batch):
    return (offsets[batch], offsets[batch + 1]) if offsets.size else (batch, batch + 1)


@inlined
def _notify(hook, state, slots, n, now):
    call_void(
        hook, (state, slots.slot.ctypes.data, slots.key.ctypes.data, slots.next_use.ctypes.data, n, now)
    )


@inlined
def _announced(rows, now, batch, cache, announced):
    """Collect the resident rows of a newly known batch that no batch in between uses."""
    n = 0
    for row in rows:
        if cache.pending[row] < now and cache.slot_of[row] >= 0:
            announced.slot[n] = cache.slot_of[row]
            announced.next_use[n] = batch
            n += 1
        cache.pending[row] = batch
    return n


@inlined
def _split(rows, next_batch, keys, now, known, cache, hit, miss, missed):
    """Sort the rows of a batch into hits and misses; number of hits."""
    hits, lacking = 0, 0
    for k in range(rows.size):
        row = rows[k]
        use = np.int64(next_batch[k])
        if use > known or use == NEVER:
            use = UNKNOWN
        slot = cache.slot_of[row]
        if slot >= 0:
            cache.last_use[slot] = now
            hit.slot[hits], hit.key[hits], hit.next_use[hits] = slot, keys[row], use
            hits += 1
        else:
            missed[lacking], miss.key[lacking], miss.next_use[lacking] = row, keys[row], use
            lacking += 1
    return hits


@inlined
def _missed_accesses(rows, uses, missed, n, missed_of):
    """Return the accesses of the first ``n`` of ``missed``, which are in order of ``rows``."""
    if uses.size == 0:
        return n
    accesses, k = 0, 0
    for at in range(rows.size):
        if k < n and rows[at] == missed[k]:
            accesses += uses[at]
            if missed_of.shape[1]:
                missed_of[0, rows[at]] += 1
                missed_of[1, rows[at]] += uses[at]
            k += 1
    return accesses


@inlined
def _admitted(gates, n, now, miss, missed, admitted):
    """Drop the misses that a gate refuses; return the number of misses left."""
    if gates[0][1] == 0 and gates[1][1] == 0:
        return n
    admitted[:n] = 1
    for state, admit in gates:
        if admit:
            call_void(admit, (state, miss.key.ctypes.data, n, now, admitted.ctypes.data))
    kept = 0
    for k in range(n):
        if admitted[k]:
            missed[kept], miss.key[kept], miss.next_use[kept] = missed[k], miss.key[k], miss.next_use[k]
            kept += 1
    return kept


@inlined
def _make_room(evict, state, need, pinned_since, now, cache, victims):
    """Evict up to ``need`` rows, pinning fewer batches if it must; (victims, pinned since, fault)."""
    got = 0
    while need:
        space = victims[got:]
        last_use = cache.last_use
        n = call_int64(evict, (state, need - got, last_use.ctypes.data, pinned_since, space.ctypes.data))
        fault = _check(space, n, need - got, cache.row_in, last_use, pinned_since)
        if fault:
            return got, pinned_since, fault
        for slot in space[:n]:
            cache.slot_of[cache.row_in[slot]] = -1
            cache.row_in[slot] = -1
        got += n
        if got == need or pinned_since == now:
            break
        pinned_since += 1
    return got, pinned_since, 0


@inlined
def _check(victims, n, asked, row_in, last_use, pinned_since):
    """Return the number of the fault in ``n`` victims, 0 if there is none; leave the arrays as they were."""
    if n < 0 or n > asked:
        return 1
    fault = 0
    for k in range(n):
        slot = victims[k]
        if slot < 0 or slot >= row_in.size:
            fault = 2
        elif row_in[slot] < 0:
            fault = 3
        elif last_use[slot] >= pinned_since:
            fault = 4
        if fault:
            for earlier in victims[:k]:
                row_in[earlier] = -2 - row_in[earlier]
            return fault
        row_in[slot] = -2 - row_in[slot]
    for slot in victims[:n]:
        row_in[slot] = -2 - row_in[slot]
    return 0
