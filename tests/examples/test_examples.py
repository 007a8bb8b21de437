"""Every script of examples/ runs, and does what its first lines say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLES, losses, output_of

SMALL = ("--rows", 20_000, "--batch-size", 128)


@pytest.mark.parametrize(
    ("script", "ranks", "hbm"),
    [("single.py", 0, "400KiB"), ("sharded.py", 2, "600KiB"), ("with_lightning.py", 0, "400KiB")],
)
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(
    script: str, ranks: int, hbm: str, tmp_path: Path
) -> None:
    small = (*SMALL, "--hbm", hbm)
    last = {"with_lightning.py": (40, 60)}.get(script, (20, 40))
    first = losses(output_of(script, tmp_path, *small, "--steps", last[0], "--folder", "a", ranks=ranks))
    then = losses(output_of(script, tmp_path, *small, "--steps", last[1], "--folder", "a", ranks=ranks))
    whole = losses(output_of(script, tmp_path, *small, "--steps", last[1], "--folder", "b", ranks=ranks))
    assert first.keys().isdisjoint(then)
    assert whole.items() <= {**first, **then}.items()
    assert len(set(whole.values())) == len(whole) > 0


def test_offload_changes_no_loss(tmp_path: Path) -> None:
    tiers = output_of("offload_torchrec.py", tmp_path, "--steps", 20)
    memory = output_of("offload_torchrec.py", tmp_path, "--steps", 20, "--in-memory")
    assert losses(tiers) == losses(memory)
    assert len(losses(tiers)) == 2
    found = re.fullmatch(r"(\d+) of (\d+) rows came from the lower tiers", tiers[-1])
    assert found
    assert 0 < int(found[1]) < int(found[2])


@pytest.mark.parametrize(("ranks", "limit"), [(0, 0.25), (2, 0.15)])
def test_the_scaled_plan_misses_what_was_predicted(ranks: int, limit: float, tmp_path: Path) -> None:
    """Tables are warm enough after 300 steps on two ranks; a rank alone has seen half of the examples."""
    lines = output_of("plan_100tb/train_scaled.py", tmp_path, "--folder", "rows", ranks=ranks)
    assert lines[0].startswith("10.0 GB of rows, 24 examples")
    rows = re.compile(r"(\w+) .* ([\d,]+) +([\d,]+)$")
    found = {
        match[1]: [float(figure.replace(",", "")) for figure in match.groups()[1:]]
        for match in map(rows.match, lines)
        if match
    }
    assert found.keys() == {"cat_0", "cat_9", "cat_19", "cat_20", "cat_21", "all"}
    for predicted, measured in found.values():
        assert measured == pytest.approx(predicted, rel=limit)


def test_no_script_is_left_out() -> None:
    """tests/planner has the tests of the other scripts of plan_100tb."""
    elsewhere = {"plan_100tb/make_inputs.py", "plan_100tb/simulate.py"}
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    scripts = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")}
    assert elsewhere < scripts
    assert not [name for name in scripts - elsewhere if f'"{name}"' not in tests]
