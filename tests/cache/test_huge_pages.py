"""Rows of a tier that grows in steps lie in huge pages: a walk to a small page takes longer than the row."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tierstore import _core

MIB = 1 << 20
ROW = 256
SLOTS = 64 * MIB // ROW


def huge_bytes() -> int:
    """Return the bytes of this process that the system is asked to put in huge pages."""
    maps = re.split(r"^[0-9a-f]+-[0-9a-f]+ .*\n", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    asked = [one for one in maps if re.search(r"^VmFlags:.* hg\b", one, re.MULTILINE)]
    return sum(1024 * int(re.findall(r"^Size: +(\d+) kB", one, re.MULTILINE)[0]) for one in asked)


@pytest.mark.parametrize(
    ("mib", "huge"),
    [
        pytest.param(3.5, 0, id="few rows"),
        pytest.param(5, 4, id="whole pages of some rows"),
        pytest.param(8 - ROW / MIB, 6, id="one row short"),
        pytest.param(8, 8, id="exactly"),
        pytest.param(8 + ROW / MIB, 10, id="one row more"),
        pytest.param(33, 34, id="many rows"),
        pytest.param(64, 64, id="all rows"),
    ],
)
def test_pages_of_rows_that_were_asked_for_in_steps(mib: float, huge: int) -> None:
    before = huge_bytes()
    rows = _core.HostRows(SLOTS, ROW)
    slots = int(mib * MIB / ROW)
    for asked in (slots // 3, slots // 2, slots - 1, slots):
        rows.commit(max(asked, 1))
    assert huge_bytes() - before == huge * MIB


@pytest.mark.parametrize("kept", [1, 8 * MIB // ROW - 1, 8 * MIB // ROW, 8 * MIB // ROW + 1, SLOTS - 1])
def test_discarded_rows_are_zeros_again(kept: int) -> None:
    """The pages of the rows that are kept stay as they are, within a huge page, too."""
    rows, slots = _core.HostRows(SLOTS, ROW), np.arange(SLOTS, dtype=np.int32)
    rows.commit(SLOTS)
    rows.copy_in(slots, np.full((SLOTS, ROW), 7, np.uint8))
    rows.discard(kept)
    rows.commit(SLOTS)
    found = np.empty((SLOTS, ROW), np.uint8)
    rows.copy_out(slots, found)
    assert (found[:kept] == 7).all()
    page = 4096 // ROW
    assert not found[-(-kept // page) * page :].any()
