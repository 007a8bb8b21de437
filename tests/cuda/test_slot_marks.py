"""``_core.SlotMarks`` against a dictionary, at and around the sizes at which threads share the work."""

from __future__ import annotations

import numpy as np
import pytest

from tierstore import _core as core

PIECE, CHECKED, AHEAD = 1 << 13, 1 << 16, 24  # csrc/cache/slot_marks.cc
STREAMS = 8


def newest(marks: np.ndarray) -> list[int]:
    return [int(marks[marks & (STREAMS - 1) == stream].max(initial=0)) for stream in range(STREAMS)]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("slots", [1, 5, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7, CHECKED + 1])
def test_marks_are_those_of_a_plain_array(slots: int, threads: int) -> None:
    random, before = np.random.default_rng(slots), core.num_threads()
    core.set_num_threads(threads)
    try:
        marks, plain = core.SlotMarks(slots), np.zeros(slots, np.int64)
        marks.grow(slots)
        for number in range(1, 40):
            some = random.permutation(slots)[: random.integers(0, slots + 1)].astype(np.int32)
            mark = number << 3 | int(random.integers(STREAMS)) if number % 3 else 0
            assert marks.touch(some, mark) == newest(plain[some])
            if mark:
                plain[some] = mark
            first = int(random.integers(0, slots + 2))
            assert marks.newest(first) == newest(plain[first:])
    finally:
        core.set_num_threads(before)


@pytest.mark.parametrize("count", [AHEAD - 1, AHEAD, AHEAD + 1, 2 * PIECE, 2 * CHECKED, 400_000])
def test_threads_give_the_marks_of_one_thread(count: int) -> None:
    random, before = np.random.default_rng(count), core.num_threads()
    calls = [
        (random.permutation(500_000)[:count].astype(np.int32), number << 3 | number % STREAMS)
        for number in range(1, 9)
    ]
    found = []
    try:
        for threads in (1, 2, 5):
            core.set_num_threads(threads)
            marks = core.SlotMarks(500_000)
            marks.grow(500_000)
            newest = [marks.touch(slots, mark) for slots, mark in calls]
            every = [marks.touch(np.array([slot], np.int32), 0) for slot in range(0, 500_000, 37)]
            found.append((newest, every, marks.newest(0)))
    finally:
        core.set_num_threads(before)
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert any(any(one) for one in found[0][1])


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("at", [0, PIECE, CHECKED - 1, CHECKED, 3 * CHECKED])
@pytest.mark.parametrize("wrong", [-1, -(1 << 31), 4 * CHECKED, (1 << 31) - 1])
def test_a_wrong_slot_changes_no_mark_wherever_it_is(wrong: int, at: int, threads: int) -> None:
    before, slots = core.num_threads(), np.arange(3 * CHECKED + 1, dtype=np.int32)
    slots[at] = wrong
    core.set_num_threads(threads)
    try:
        marks = core.SlotMarks(8 * CHECKED)
        marks.grow(4 * CHECKED)
        with pytest.raises(ValueError, match="a slot has no memory"):
            marks.touch(slots, 5)
        assert marks.newest(0) == [0] * STREAMS
    finally:
        core.set_num_threads(before)


def test_slots_without_marks_are_refused() -> None:
    marks = core.SlotMarks(10)
    marks.grow(4)
    marks.grow(2)  # it never shrinks
    assert marks.touch(np.arange(4, dtype=np.int32), 5) == [0] * STREAMS
    for wrong in ([4], [0, -1], [1, 2, 9]):
        with pytest.raises(ValueError, match="a slot has no memory"):
            marks.touch(np.array(wrong, np.int32), 8)
    assert marks.newest(0) == [*[0] * 5, 5, 0, 0]  # nothing has changed
    marks.grow(10)
    assert marks.touch(np.arange(10, dtype=np.int32), 0) == [*[0] * 5, 5, 0, 0]
    with pytest.raises(ValueError, match="not so many slots"):
        marks.grow(11)
    with pytest.raises(TypeError):
        marks.touch(np.arange(3), 1)  # type: ignore[arg-type]  # int64
