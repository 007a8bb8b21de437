"""``_core.SlotMarks`` against a dictionary, at and around the sizes at which threads share the work."""

from __future__ import annotations

import numpy as np
import pytest

from tierstore import _core as core

PIECE = 1 << 14  # csrc/cache/slot_marks.cc


def newest(marks: np.ndarray) -> list[int]:
    return [int(marks[marks & 3 == stream].max(initial=0)) for stream in range(4)]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("slots", [1, 5, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7])
def test_marks_are_those_of_a_plain_array(slots: int, threads: int) -> None:
    random, before = np.random.default_rng(slots), core.num_threads()
    core.set_num_threads(threads)
    try:
        marks, plain = core.SlotMarks(slots), np.zeros(slots, np.int64)
        marks.grow(slots)
        for number in range(1, 40):
            some = random.permutation(slots)[: random.integers(0, slots + 1)].astype(np.int32)
            mark = number << 2 | int(random.integers(4)) if number % 3 else 0
            assert marks.touch(some, mark) == newest(plain[some])
            if mark:
                plain[some] = mark
            first = int(random.integers(0, slots + 2))
            assert marks.newest(first) == newest(plain[first:])
    finally:
        core.set_num_threads(before)


def test_slots_without_marks_are_refused() -> None:
    marks = core.SlotMarks(10)
    marks.grow(4)
    marks.grow(2)  # it never shrinks
    assert marks.touch(np.arange(4, dtype=np.int32), 5) == [0, 0, 0, 0]
    for wrong in ([4], [0, -1], [1, 2, 9]):
        with pytest.raises(ValueError, match="a slot has no memory"):
            marks.touch(np.array(wrong, np.int32), 8)
    assert marks.newest(0) == [0, 5, 0, 0]  # nothing has changed
    marks.grow(10)
    assert marks.touch(np.arange(10, dtype=np.int32), 0) == [0, 5, 0, 0]
    with pytest.raises(ValueError, match="not so many slots"):
        marks.grow(11)
    with pytest.raises(TypeError):
        marks.touch(np.arange(3), 1)  # type: ignore[arg-type]  # int64
