"""``tierstore bench checkpoint`` on a small table: every figure is there and makes sense."""

import argparse
import json
from pathlib import Path

import pytest

from bench import checkpoint


def test_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    checkpoint.add_arguments(parser)
    arguments = f"--rows 3000 --dense 100 --rounds 2 --dir {tmp_path} --json {tmp_path / 'out.json'}"
    assert checkpoint.run(parser.parse_args(arguments.split())) == 0
    figures = json.loads((tmp_path / "out.json").read_text())
    for engine in ("native", "rocksdb", "lmdb"):
        assert figures[f"{engine}.save_s"] > 0
        assert figures[f"{engine}.restore_s"] > 0
        assert figures[f"{engine}.file_bytes"] > 400
        assert 1 <= figures[f"{engine}.row_bytes_per_changed_byte"] < 100
    assert "native.save_s" in capsys.readouterr().out
