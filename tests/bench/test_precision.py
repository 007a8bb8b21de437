"""The costs of rows in fewer bytes, on a data set so small that it takes a second."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.research import main, precision


def test_every_form_is_trained_beside_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tierstore.data.synthetic.TEST_EXAMPLES", 512)
    data = ["--data=synthetic:zipf:1.0", "--rows=2000", "--tables=2", "--dim=8", "--batch-size=64"]
    options = ["--steps=20", "--seeds=2", "--forms=bf16/bf16,int8/fp32", "--roundings=stochastic,nearest"]
    out = tmp_path / "out.json"
    assert main(None, precision.add_arguments, precision.run, [*data, *options, "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    forms = [f"{form} {way}" for form in ("bf16/bf16", "int8/fp32") for way in ("stochastic", "nearest")]
    assert list(figures["auc"]) == ["fp32", "fp32 disturbed", *forms]
    assert all(len(aucs) == 2 for aucs in figures["auc"].values())
    for name in ("fp32 disturbed", *forms):
        assert 0 <= abs(figures[f"{name}.auc_difference"]) <= figures[f"{name}.auc_worst"] < 0.05
        assert 0 < abs(figures[f"{name}.loss_difference"]) < 0.01
    told = capsys.readouterr().err
    assert "seed 1, int8/fp32 nearest: AUC 0." in told
    assert "mean loss 0." in told
