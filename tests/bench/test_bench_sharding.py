"""tierstore bench sharding, small and without torchrec."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import bench.sharding


def test_a_step_is_measured(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    bench.sharding.add_arguments(parser)
    arguments = "--ranks 2 --cuts table_wise --tables 3 --rows 100 --dim 4 --pooling-factor 2 --steps 3"
    result = tmp_path / "result.json"
    args = parser.parse_args(
        [*arguments.split(), "--batch-size", "8", "--no-torchrec", "--json", str(result)]
    )
    assert bench.sharding.run(args) == 0
    figures = json.loads(result.read_text())["cuts"]["table_wise"]
    assert len(figures["tierstore"]["seconds"]) == 3
    # rank 0 asks rank 1 for table t1, and answers it for t0 and t2
    assert figures["bytes_sent"] == 4 * (8 + 16) + 2 * 4 * 4 * 8 + 4 * 4 * 8
