"""The two FIFO queues of slots of S3-FIFO, as rings that are read in order.

Unlike in linked lists, the next slot is known before the present one is read, so a walk can prefetch. An
entry whose slot has left the queue is stale and skipped. A ring has some more room than there are slots; when
it is full, stale entries are dropped.

Victims are looked for in a walk over both queues: ``look`` at the oldest slot that the walk has not passed,
``take`` it or ``keep`` it where it is, and in the end ``finish``.

A policy merges ``new_queues`` into its state and passes the state to the functions here.
"""

from __future__ import annotations

import numpy as np

from cache_policies.inner import called, inlined
from cache_policies.prefetch import AHEAD, prefetch

NO_SLOT = -1
_GONE = -1


def new_queues(capacity: int) -> dict[str, np.ndarray]:
    """Return arrays for slots ``0 .. capacity - 1``, none of them in a queue."""
    return {
        "queue": np.zeros(2 * (capacity + capacity // 8 + AHEAD), np.int32),  # two rings of slots
        "place": np.full(capacity, _GONE, np.int32),  # per slot: index of its entry in "queue"
        "length": np.zeros(2, np.int64),  # slots per queue
        # Positions per queue, which count on where its ring wraps: the first entry, how many from there on a
        # walk has kept, the entry that it looks at next, and the end. What lies between is free.
        "queue_first": np.zeros(2, np.int64),
        "queue_kept": np.zeros(2, np.int64),
        "queue_at": np.zeros(2, np.int64),
        "queue_end": np.zeros(2, np.int64),
    }


@inlined
def _index(s, queue, position):
    room = s.queue.size >> 1
    return queue * room + (position - room if position >= room else position)


@inlined
def queue_of(s, slot):
    """Return the queue, 0 or 1, of a slot that is in one."""
    return 1 if s.place[slot] >= s.queue.size >> 1 else 0


@inlined
def push(s, queue, slot):
    """Make a slot that is in no queue the newest of ``queue``."""
    if s.queue_end[queue] - s.queue_first[queue] == s.queue.size >> 1:
        _drop_stale(s, queue)
    index = _index(s, queue, s.queue_end[queue])
    s.queue[index] = slot
    s.place[slot] = index
    s.queue_end[queue] += 1
    s.length[queue] += 1


@inlined
def drop(s, slot):
    """Take a slot out of its queue, wherever the slot is in the queue."""
    s.length[queue_of(s, slot)] -= 1
    s.place[slot] = _GONE


@inlined
def look(s, queue):
    """Return the oldest slot that the walk has not passed, ``NO_SLOT`` if there is none."""
    while s.queue_at[queue] < s.queue_end[queue]:
        index = _index(s, queue, s.queue_at[queue])
        slot = s.queue[index]
        if s.place[slot] == index:
            return slot
        s.queue_at[queue] += 1
    return np.int32(NO_SLOT)


@inlined
def upcoming(s, queue, distance):
    """Return the slot ``distance`` entries behind the walk's entry; any slot if there is no such entry."""
    return s.queue[_index(s, queue, min(s.queue_at[queue] + distance, s.queue_end[queue]))]


@inlined
def take(s, queue, slot):
    """Take the slot that ``look`` gave out of the queue."""
    s.place[slot] = _GONE
    s.queue_at[queue] += 1
    s.length[queue] -= 1


@inlined
def keep(s, queue, slot):
    """Let the walk pass the slot that ``look`` gave."""
    s.queue[_index(s, queue, s.queue_first[queue] + s.queue_kept[queue])] = slot
    s.queue_kept[queue] += 1
    s.queue_at[queue] += 1


@inlined
def finish(s):
    """End the walk."""
    for queue in range(2):
        _close_gap(s, queue)
        s.queue_kept[queue] = 0
        s.queue_at[queue] = s.queue_first[queue]


@called
def _close_gap(s, queue):
    """Move what the walk has kept to right before the entry that it looks at next."""
    first, at, kept = s.queue_first[queue], s.queue_at[queue], s.queue_kept[queue]
    if first + kept < at:
        for k in range(1, kept + 1):
            slot = s.queue[_index(s, queue, first + kept - k)]
            index = _index(s, queue, at - k)
            s.queue[index] = slot
            s.place[slot] = index
    room = s.queue.size >> 1
    wrapped = room if at - kept >= room else 0
    s.queue_first[queue] = at - kept - wrapped
    s.queue_at[queue] = at - wrapped
    s.queue_end[queue] -= wrapped


@called
def _drop_stale(s, queue):
    _close_gap(s, queue)
    end = s.queue_end[queue]
    to = s.queue_at[queue]
    for position in range(to, end):
        index = _index(s, queue, position)
        if position + AHEAD < end:
            prefetch(s.place, s.queue[_index(s, queue, position + AHEAD)])
        slot = s.queue[index]
        if s.place[slot] == index:
            index = _index(s, queue, to)
            s.queue[index] = slot
            s.place[slot] = index
            to += 1
    s.queue_end[queue] = to
