"""A priority queue of slots with O(1) moves: one FIFO list per distinct key, and a heap of the lists.

Keys are int64; the smallest is evicted first, and within one key the slot that came first. There are few
distinct keys (frequencies; batches of the window) for many slots, so the heap of buckets is small and rarely
changes. The number of buckets is bounded: when all are in use, a slot that needs a new key stays in its
bucket (or joins the first one). Frequencies fill all buckets only with ``POOL`` different ones at a time,
which takes at least ``POOL**2 / 2`` = 5.4e8 touches of resident rows.

A policy merges ``new_buckets`` into its state and passes the state to the functions here.
"""

from __future__ import annotations

import numpy as np

from cache_policies import hashing
from cache_policies.inner import inlined
from cache_policies.prefetch import AHEAD, prefetch

POOL = 1 << 15
NO_BUCKET = -1
_NEXT, _BUCKET, _SPARE = 1, 2, 3  # words of a node beside the first, its predecessor in the list
_PLACED = 1  # flag beside the bucket: the slot came to it without a use
_HINTS = 64  # a power of 2
_DEAD = np.iinfo(np.int64).min  # the key of a bucket that is not in use


def new_buckets(capacity: int, pool: int = POOL) -> dict[str, np.ndarray]:
    """Return empty arrays for ``capacity`` slots and at most ``pool`` buckets."""
    pool = min(capacity + 1, pool)  # one more bucket: a move makes the new bucket before it drops the old
    node = np.zeros((capacity + pool, 4), np.int32)  # slots, then sentinels: one cache line has all of a slot
    node[capacity:, 0] = node[capacity:, _NEXT] = np.arange(capacity, capacity + pool, dtype=np.int32)
    return {
        "node": node.reshape(-1),  # before, after, 2 * bucket + placed, a word for the policy
        "key": np.full(pool, _DEAD),
        "hint": np.zeros(_HINTS, np.int32),  # by the last bits of a key: a guess at its bucket
        "position": np.zeros(pool, np.int32),  # position of the bucket in the heap
        "heap": np.arange(pool, dtype=np.int32),  # heap, then free buckets
        "used": np.zeros(1, np.int64),  # buckets in use = size of the heap
        "table": hashing.new_table(pool),
    }


@inlined
def fetch(s, slots, i):
    """Prefetch the nodes of later slots and then their neighbours; call it for each ``i``."""
    if i + 2 * AHEAD < slots.size:
        prefetch(s.node, 4 * np.int64(slots[i + 2 * AHEAD]))
    if i + AHEAD < slots.size:
        at = 4 * np.int64(slots[i + AHEAD])
        prefetch(s.node, 4 * np.int64(s.node[at]))
        prefetch(s.node, 4 * np.int64(s.node[at + _NEXT]))


@inlined
def spare(s, slot):
    """Return the position in ``s.node`` of a slot's word for the policy; it stays when the slot moves."""
    return 4 * np.int64(slot) + _SPARE


@inlined
def _sentinel(s, bucket):
    return s.node.size // 4 - s.key.size + np.int64(bucket)


@inlined
def _bucket(s, slot):
    return s.node[4 * np.int64(slot) + _BUCKET] >> 1


@inlined
def _unlink(s, slot):
    at = 4 * np.int64(slot)
    before, after = s.node[at], s.node[at + _NEXT]
    s.node[4 * np.int64(before) + _NEXT] = after
    s.node[4 * np.int64(after)] = before


@inlined
def _link(s, slot, before, after):
    at = 4 * np.int64(slot)
    s.node[at] = before
    s.node[at + _NEXT] = after
    s.node[4 * np.int64(before) + _NEXT] = slot
    s.node[4 * np.int64(after)] = slot


@inlined
def _join(s, slot, bucket):
    """Make the slot the newest of the bucket."""
    sentinel = _sentinel(s, bucket)
    s.node[4 * np.int64(slot) + _BUCKET] = 2 * bucket
    _link(s, slot, s.node[4 * sentinel], sentinel)


@inlined
def _sift_up(s, at, bucket):
    while at > 0:
        parent = (at - 1) >> 1
        if s.key[s.heap[parent]] <= s.key[bucket]:
            break
        s.heap[at] = s.heap[parent]
        s.position[s.heap[at]] = at
        at = parent
    s.heap[at] = bucket
    s.position[bucket] = at


@inlined
def _sift_down(s, at, bucket):
    size = s.used[0]
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and s.key[s.heap[child + 1]] < s.key[s.heap[child]]:
            child += 1
        if s.key[s.heap[child]] >= s.key[bucket]:
            break
        s.heap[at] = s.heap[child]
        s.position[s.heap[at]] = at
        at = child
    s.heap[at] = bucket
    s.position[bucket] = at


@inlined
def _take_from_heap(s, bucket):
    """Remove ``bucket`` from the heap; it is left just behind the heap's end."""
    s.used[0] -= 1
    size = s.used[0]
    at = s.position[bucket]
    last = s.heap[size]
    s.heap[size] = bucket
    if last != bucket:
        if at > 0 and s.key[last] < s.key[s.heap[(at - 1) >> 1]]:
            _sift_up(s, at, last)
        else:
            _sift_down(s, at, last)


@inlined
def _bucket_of(s, key):
    """Return the bucket of ``key``, made if need be; ``NO_BUCKET`` when all are in use."""
    hint = s.hint[key & (_HINTS - 1)]
    if s.key[hint] == key:
        return hint
    at = hashing.find(s.table, s.key, key)
    if s.table[at] != 0:
        s.hint[key & (_HINTS - 1)] = s.table[at] - 1
        return s.table[at] - 1
    size = s.used[0]
    if size == s.heap.size:
        return NO_BUCKET
    bucket = s.heap[size]
    s.key[bucket] = key
    s.table[at] = bucket + 1
    s.used[0] += 1
    _sift_up(s, size, bucket)
    return bucket


@inlined
def _forget_key(s, bucket):
    hashing.erase(s.table, s.key, s.key[bucket])
    s.key[bucket] = _DEAD


@inlined
def _drop_if_empty(s, bucket):
    sentinel = _sentinel(s, bucket)
    if s.node[4 * sentinel] == sentinel:
        _take_from_heap(s, bucket)
        _forget_key(s, bucket)


@inlined
def add(s, slot, key):
    """Make a slot that is in no bucket the newest of ``key``."""
    bucket = _bucket_of(s, key)
    _join(s, slot, s.heap[0] if bucket == NO_BUCKET else bucket)


@inlined
def remove(s, slots):
    """Take slots out of their buckets."""
    for i in range(slots.size):
        fetch(s, slots, i)
        _unlink(s, slots[i])
        _drop_if_empty(s, _bucket(s, slots[i]))


@inlined
def move(s, slot, key):
    """Make a slot that is in some bucket the newest of ``key``."""
    old = _bucket(s, slot)
    bucket = old if s.key[old] == key else _bucket_of(s, key)
    if bucket == NO_BUCKET:
        bucket = old
    _unlink(s, slot)
    _join(s, slot, bucket)
    if bucket != old:
        _drop_if_empty(s, old)


@inlined
def place(s, slot, key):
    """Make a slot that is in some bucket, and is not used now, the oldest of ``key``."""
    old = _bucket(s, slot)
    bucket = old if s.key[old] == key else _bucket_of(s, key)
    if bucket == NO_BUCKET:
        bucket = old
    _unlink(s, slot)
    sentinel = _sentinel(s, bucket)
    s.node[4 * np.int64(slot) + _BUCKET] = 2 * bucket + _PLACED
    _link(s, slot, sentinel, s.node[4 * sentinel + _NEXT])
    if bucket != old:
        _drop_if_empty(s, old)


@inlined
def key_of(s, slot):
    return s.key[_bucket(s, slot)]


@inlined
def evict(s, n, last_use, pinned_since, victims):
    """Take the first ``n`` unpinned slots in order of key; return how many there were.

    A bucket holds first the slots that were placed there, then the slots that came by a use, in order of
    use: behind a pinned slot of the latter all slots are pinned. Buckets with pinned slots only are put aside
    behind the heap's end and return to the heap afterwards.
    """
    count, aside = 0, 0
    while count < n and s.used[0] > 0:
        bucket = s.heap[0]
        sentinel = _sentinel(s, bucket)
        slot = s.node[4 * sentinel + _NEXT]
        while slot != sentinel and count < n:
            at = 4 * np.int64(slot)
            after = s.node[at + _NEXT]
            if last_use[slot] < pinned_since:
                _unlink(s, slot)
                victims[count] = slot
                count += 1
            elif not s.node[at + _BUCKET] & _PLACED:
                break
            slot = after
        if s.node[4 * sentinel] == sentinel:
            free = s.used[0] + aside - 1
            _take_from_heap(s, bucket)
            _forget_key(s, bucket)
            s.heap[s.used[0]], s.heap[free] = s.heap[free], bucket
        elif count < n:
            _take_from_heap(s, bucket)
            aside += 1
    for _ in range(aside):
        size = s.used[0]
        s.used[0] += 1
        _sift_up(s, size, s.heap[size])
    return count
