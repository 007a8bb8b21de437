"""A priority queue of slots with O(1) moves: one FIFO list per distinct key, and a heap of the lists.

Keys are int64; the smallest is evicted first, and within one key the slot that came first. There are few
distinct keys (frequencies; batches of the window) for many slots, so the heap of buckets is small and rarely
changes. The number of buckets is bounded by ``POOL``: when all are in use, a slot that needs a new key stays
in its bucket (or joins the first one). With frequencies that takes more than ``POOL**2 / 2`` = 8.6e9 touches
of resident rows.

A policy merges ``new_buckets`` into its state and passes the state to the functions here.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from cache_policies import hashing
from cache_policies.lists import new_lists, push_newest, push_oldest, unlink

POOL = 1 << 17
NO_BUCKET = -1


def new_buckets(capacity: int, pool: int = POOL) -> dict[str, np.ndarray]:
    """Arrays for ``capacity`` slots and at most ``pool`` buckets."""
    pool = min(capacity + 1, pool)  # one more: a move makes the new bucket before it drops the old
    prev, next_ = new_lists(capacity, pool)
    return {
        "prev": prev,
        "next": next_,
        "bucket": np.zeros(capacity, np.int32),
        "placed": np.zeros(capacity, np.bool_),  # came to its bucket without being used
        "key": np.zeros(pool, np.int64),
        "position": np.zeros(pool, np.int32),  # of the bucket in the heap
        "heap": np.arange(pool, dtype=np.int32),  # heap, then free buckets
        "used": np.zeros(1, np.int64),  # buckets in use = size of the heap
        "table": hashing.new_table(pool),
    }


@njit(error_model="numpy", forceinline=True)
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


@njit(error_model="numpy", forceinline=True)
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


@njit(error_model="numpy", forceinline=True)
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


@njit(error_model="numpy", forceinline=True)
def _bucket_of(s, key):
    """The bucket of ``key``, made if need be; ``NO_BUCKET`` when all are in use."""
    at = hashing.find(s.table, s.key, key)
    if s.table[at] != 0:
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


@njit(error_model="numpy", forceinline=True)
def _drop_if_empty(s, bucket):
    sentinel = s.bucket.size + bucket
    if s.next[sentinel] == sentinel:
        hashing.erase(s.table, s.key, s.key[bucket])
        _take_from_heap(s, bucket)


@njit(error_model="numpy", forceinline=True)
def add(s, slot, key):
    """A slot that is in no bucket becomes the newest of ``key``."""
    bucket = _bucket_of(s, key)
    if bucket == NO_BUCKET:
        bucket = s.heap[0]
    s.bucket[slot] = bucket
    s.placed[slot] = False
    push_newest(s.prev, s.next, s.bucket.size + bucket, slot)


@njit(error_model="numpy", forceinline=True)
def take(s, slot):
    """Remove a slot from its bucket."""
    unlink(s.prev, s.next, slot)
    _drop_if_empty(s, s.bucket[slot])


@njit(error_model="numpy", forceinline=True)
def move(s, slot, key):
    """A slot that is in some bucket becomes the newest of ``key``."""
    old = s.bucket[slot]
    bucket = _bucket_of(s, key)
    if bucket == NO_BUCKET:
        bucket = old
    unlink(s.prev, s.next, slot)
    s.bucket[slot] = bucket
    s.placed[slot] = False
    push_newest(s.prev, s.next, s.bucket.size + bucket, slot)
    if bucket != old:
        _drop_if_empty(s, old)


@njit(error_model="numpy", forceinline=True)
def place(s, slot, key):
    """A slot that is in some bucket, and is not used now, becomes the oldest of ``key``."""
    move(s, slot, key)
    s.placed[slot] = True
    unlink(s.prev, s.next, slot)
    push_oldest(s.prev, s.next, s.bucket.size + s.bucket[slot], slot)


@njit(error_model="numpy", forceinline=True)
def key_of(s, slot):
    return s.key[s.bucket[slot]]


@njit(error_model="numpy", forceinline=True)
def evict(s, n, last_use, pinned_since, victims):
    """Take the first ``n`` unpinned slots in order of key; returns how many there were.

    A bucket holds first the slots that were placed there, then those that came when they were used, in order
    of use: behind a pinned one of these all are pinned. Buckets with pinned slots only are put aside behind
    the heap's end and return to it afterwards.
    """
    count, aside = 0, 0
    while count < n and s.used[0] > 0:
        bucket = s.heap[0]
        sentinel = s.bucket.size + bucket
        slot = s.next[sentinel]
        while slot != sentinel and count < n:
            after = s.next[slot]
            if last_use[slot] < pinned_since:
                unlink(s.prev, s.next, slot)
                victims[count] = slot
                count += 1
            elif not s.placed[slot]:
                break
            slot = after
        if s.next[sentinel] == sentinel:
            free = s.used[0] + aside - 1
            hashing.erase(s.table, s.key, s.key[bucket])
            _take_from_heap(s, bucket)
            s.heap[s.used[0]], s.heap[free] = s.heap[free], bucket
        elif count < n:
            _take_from_heap(s, bucket)
            aside += 1
    for _ in range(aside):
        size = s.used[0]
        s.used[0] += 1
        _sift_up(s, size, s.heap[size])
    return count
