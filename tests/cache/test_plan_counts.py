"""What a plan counts of the tiers below it, and rows with many positions, against counting one by one."""

from __future__ import annotations

import numpy as np
import pytest

from tierstore import _core
from tierstore.keys import make_keys

TABLES = 3


def planned(seed: int, n: int, resident: int) -> tuple[_core.Plan, np.ndarray, np.ndarray]:
    """Return a plan of a tier that has some rows, the lookup's keys, and where their positions begin."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.choice(4 * max(1, n), n, replace=False))
    keys = np.concatenate([make_keys(table, ids[table::TABLES]) for table in range(TABLES)])
    tier = _core.Tier(lanes=[[_core.ShareConfig(slots=2 * max(1, n))]], share_of=[0] * TABLES, grows=True)
    for part, now in ((rng.permutation(keys)[:resident], 0), (keys, 1)):
        plan = tier.begin(part, None, now)
        tier.evict(now, plan)
        tier.prepare(False, plan)
        tier.assign(part, False, plan)
    starts = np.concatenate([[0], np.cumsum(rng.integers(0, 9, n))]).astype(np.int32)
    return plan, keys, starts


@pytest.mark.parametrize(("n", "resident"), [(0, 0), (1, 0), (1, 1), (40, 15), (5000, 1000), (5000, 5000)])
@pytest.mark.parametrize("tiers", [0, 1, 3])
def test_counts_are_those_of_counting_one_by_one(n: int, resident: int, tiers: int) -> None:
    plan, keys, starts = planned(n + tiers, n, resident)
    rng = np.random.default_rng(tiers)
    missing, uses = keys[plan.absent], np.diff(starts)
    expected, here, left = [], [], list(plan.absent)
    for _ in range(tiers):
        flags = rng.random(len(left)) < 0.4
        found = [row for row, flag in zip(left, flags, strict=True) if flag]
        by_table = [
            [sum(int(keys[row]) >> 48 == t for row in rows) for t in range(TABLES)] for rows in (left, found)
        ]
        totals = len(left), len(found), sum(uses[r] for r in left), sum(uses[r] for r in found)
        expected.append((totals, *by_table))
        here.append(flags)
        left = [row for row, flag in zip(left, flags, strict=True) if not flag]
    missed, counts = plan.count(missing, starts, here, TABLES)
    assert missed == sum(uses[row] for row in plan.misses)
    assert counts == expected


def test_arrays_that_do_not_go_with_the_plan() -> None:
    plan, keys, starts = planned(1, 40, 15)
    missing = keys[plan.absent]
    for wrong in (
        (missing[1:], starts, [], TABLES),
        (missing, starts[1:], [], TABLES),
        (missing, starts, [np.zeros(len(missing) - 1, bool)], TABLES),
        (missing, starts, [np.ones(len(missing), bool), np.ones(1, bool)], TABLES),
    ):
        with pytest.raises(ValueError, match=r"plan|asked"):
            plan.count(*wrong)
    with pytest.raises(IndexError):
        plan.count(missing, starts, [np.zeros(len(missing), bool)], 1)


@pytest.mark.parametrize(("few", "piece"), [(0, 1), (2, 4), (32, 256), (5, 5)])
def test_rows_with_many_positions(few: int, piece: int) -> None:
    rng = np.random.default_rng(few)
    uses = np.minimum(rng.zipf(1.3, 3000), 5000)
    starts = np.concatenate([[0], np.cumsum(uses)]).astype(np.int32)
    hot, others, first_piece = _core.long_rows(starts, few, piece)
    assert hot.tolist() == [row for row, n in enumerate(uses) if n > few and n > piece]
    assert others.tolist() == [row for row, n in enumerate(uses) if few < n <= piece]
    pieces = [-(-int(uses[row]) // piece) for row in hot]
    assert first_piece.tolist() == np.cumsum([0, *pieces]).tolist()
    empty = _core.long_rows(np.zeros(1, np.int32), few, piece)
    assert [array.tolist() for array in empty] == [[], [], [0]]
