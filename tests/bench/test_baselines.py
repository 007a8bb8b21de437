from __future__ import annotations

import argparse
import json

import pytest

from bench import baselines
from tierstore.errors import ConfigError
from tierstore.result_file import machine


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    baselines.add_arguments(parser)
    return baselines.run(parser.parse_args(arguments))


def test_all_systems_train_the_same_model(tmp_path, capsys):
    out = tmp_path / "out.json"
    names = "torch-sparse,torch-dense,fbgemm,in-memory,tiered"
    code = run(
        *(
            "--data",
            "synthetic:zipf:1.1",
            "--rows",
            "2000",
            "--tables",
            "4",
            "--steps",
            "40",
            "--batch-size",
            "128",
        ),
        *(
            "--dim",
            "8",
            "--lr",
            "0.05",
            "--hbm",
            "128KiB",
            "--rounds",
            "3",
            "--systems",
            names,
            "--json",
            str(out),
        ),
    )
    assert code == 0
    result = json.loads(out.read_text())
    assert result["machine"].keys() == machine().keys()  # the page of measurements names all of it
    systems = result["systems"]
    assert list(systems) == names.split(",")
    assert "in-memory" in capsys.readouterr().out
    for figures in systems.values():
        assert figures["auc"] == pytest.approx(systems["torch-sparse"]["auc"], abs=0.002)
        assert figures["last_loss"] == pytest.approx(systems["torch-sparse"]["last_loss"], abs=1e-3)
        assert len(figures["examples_per_s_by_round"]) == 3
        assert figures["ratio_to_torch-sparse"] > 0
    assert systems["tiered"]["auc"] == systems["in-memory"]["auc"]
    assert systems["torch-sparse"]["auc"] > 0.55


def test_wrong_options():
    with pytest.raises(ConfigError, match="--systems: there is no 'gpu'; there are torch-sparse"):
        run("--systems", "fbgemm,gpu")
    with pytest.raises(ConfigError, match="give --steps"):
        run("--data", "synthetic:zipf:1", "--rows", "10")
