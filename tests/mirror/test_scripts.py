"""Scripts of torchrec run on tiers with nothing changed but the name that they import."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import warm

SCRIPTS = Path(__file__).parent / "scripts"
SMALL = {"TIERSTORE_HBM": "1MiB", "TIERSTORE_UVM": "512KiB", "TIERSTORE_SSD": "256MiB"}
GOLDEN = SMALL | {"TIERSTORE_HBM": "16MiB"}
"""As much as the planner asks for where a script does not say its batch size; the script uses more rows."""
IN_MEMORY = {"TIERSTORE_HBM": "all"}


def imports_changed(name: str, folder: Path) -> Path:
    """The script after ``sed 's/\\btorchrec\\b/tierstore.torchrec/'``."""
    text = (SCRIPTS / name).read_text(encoding="utf-8")
    changed = folder / name
    changed.write_text(re.sub(r"\btorchrec\b", "tierstore.torchrec", text), encoding="utf-8")
    return changed


def torchrun(script: Path, ranks: int, tiers: dict[str, str], *arguments: str) -> list[str]:
    """Run a script on ``ranks`` gloo ranks of this machine; return what rank 0 printed."""
    launch = [str(warm.folder() / "torchrun"), "--standalone", "--nproc-per-node", str(ranks)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIERSTORE_")}
    environment |= {"OMP_NUM_THREADS": "1", **tiers}
    done = subprocess.run(
        [*launch, str(script), *arguments], capture_output=True, text=True, timeout=170, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line]


def losses(lines: list[str]) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.search(r"loss (\S+)", line))]


def falls(values: list[float]) -> bool:
    """Whether a model learns batches that it sees again and again."""
    third = len(values) // 3
    return sum(values[-third:]) < sum(values[:third])


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return imports_changed("golden_training.py", tmp_path_factory.mktemp("golden"))


def test_golden_training_has_the_bits_of_training_in_memory(golden: Path) -> None:
    lines = torchrun(golden, 1, GOLDEN)
    assert len(losses(lines)) == 40
    assert falls(losses(lines))
    assert lines == torchrun(golden, 1, IN_MEMORY)


def test_golden_training_on_two_ranks(golden: Path) -> None:
    found = losses(torchrun(golden, 2, GOLDEN))
    assert len(found) == 40
    assert falls(found)
    quantized = losses(torchrun(golden, 2, GOLDEN, "--quantized", "--steps", "4"))
    assert quantized == pytest.approx(found[:4], rel=1e-2)
    assert quantized != found[:4]


@pytest.mark.parametrize("ranks", [1, 2])
def test_dlrm_main(ranks: int, tmp_path: Path) -> None:
    lines = torchrun(imports_changed("dlrm_main.py", tmp_path), ranks, SMALL)
    for kind in ("original", "dcn", "projection"):
        of_kind = [line for line in lines if line.startswith(kind)]
        assert of_kind[0] == f"{kind} model.sparse_arch.embedding_bag_collection 26 tables are planned"
        assert len(losses(of_kind)) == 8
        assert of_kind[1].endswith("lr [0.0375]"), "a schedule reaches tables and dense parameters"
        assert of_kind[-1].endswith("lr [0.05]")


@pytest.mark.parametrize("ranks", [1, 2])
def test_bert4rec(ranks: int, tmp_path: Path) -> None:
    lines = torchrun(imports_changed("bert4rec.py", tmp_path), ranks, {**SMALL, "TIERSTORE_HBM": "64KiB"})
    assert falls(losses(lines))
    assert lines[-1] == "['items.embeddings.item_embedding.weight']"


# Without a GPU torchrec has no fused Adam, which bert4rec.py asks for.
@pytest.mark.parametrize("name", ["golden_training.py", "dlrm_main.py"])
def test_the_scripts_are_scripts_of_torchrec(name: str) -> None:
    assert losses(torchrun(SCRIPTS / name, 1, {}))
