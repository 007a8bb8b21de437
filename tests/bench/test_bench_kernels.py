"""``tierstore bench kernels`` on small tables: every figure is there and makes sense."""

import argparse
import json

import pytest

from bench import kernels


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_all_figures(optimizer, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    out = tmp_path / "out.json"
    shape = f"--tables 3 --rows 100 --dim 8 --batch-size 20 --rounds 2 --threads 1 --optimizer {optimizer}"
    assert kernels.run(parser.parse_args(f"{shape} --json {out}".split())) == 0
    figures = json.loads(out.read_text())
    for key in ("dedup_ms", "lookup_ms", "csr_ms", "update_ms", "gather_rows_ms", "memcpy_rows_ms"):
        assert figures[key] > 0
    assert ("ratio.both" in figures) == (optimizer != "adam")  # fbgemm has no Adam on the CPU
    assert "update_ms" in capsys.readouterr().out
