"""The mirror's modules and names: torchrec's, except those that tiers change and those that are refused."""

from __future__ import annotations

import inspect
import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec

import tierstore
from tierstore import ConfigError
from tierstore.errors import MissingPackageError
from tierstore.torchrec.mirror import mirrored
from tierstore.torchrec.names import OURS, REFUSED


def theirs_of(home: str) -> Any:
    module, name = home.split(":")
    return getattr(import_module(module), name)


_MINOR = int(torchrec.__version__.split(".")[1])
OURS_HERE = [home for home in OURS if _MINOR >= 7 or "FixedAbsolute" not in home]
"""Names of the installed torchrec: 1.6 has no FixedAbsoluteStorageReservation."""


@pytest.mark.parametrize("home", OURS_HERE)
def test_what_tiers_change_is_ours(home: str) -> None:
    module, name = home.split(":")
    ours = getattr(import_module(mirrored(module)), name)
    assert ours is not theirs_of(home)
    assert ours.__module__.startswith("tierstore.")


@pytest.mark.parametrize("home", REFUSED)
def test_what_would_stay_out_of_tiers_says_what_to_use(home: str) -> None:
    module, name = home.split(":")
    assert theirs_of(home) is not None
    with pytest.raises(ConfigError, match=f"tierstore.torchrec.*{name}: .*"):
        getattr(import_module(mirrored(module)), name)
    assert name not in dir(import_module(mirrored(module)))
    with pytest.raises(ConfigError, match=name):
        exec(f"from {mirrored(module)} import {name}")


# Of plans, whose fields are tierstore's, and of classes that have no arguments of their own.
OTHER_ARGUMENTS = {"ShardingPlan", "ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection"}
NEWER = {
    "async_inplace_copy": 9,
    "clear_data_dist_inputs": 8,
    "created_by_factory": 8,
    "free_features_storage_early": 8,
    "pipeline_postproc": 8,
    "use_gather_select_per_sharding": 8,
}
"""Arguments that older releases than torchrec 1.8 or 1.9 do not have everywhere."""


@pytest.mark.parametrize("home", [home for home in OURS_HERE if home.split(":")[1] not in OTHER_ARGUMENTS])
def test_arguments_are_torchrecs_in_their_order(home: str) -> None:
    module, name = home.split(":")
    ours, theirs = getattr(import_module(mirrored(module)), name), theirs_of(home)
    wanted = list(inspect.signature(theirs).parameters)
    found = inspect.signature(ours).parameters
    positional = [p.name for p in found.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    any_name = any(p.kind is p.VAR_KEYWORD for p in found.values())
    positional = [one for one in positional if one in wanted or NEWER.get(one, 0) <= _MINOR]
    assert positional == wanted[: len(positional)]
    assert any_name or len(positional) == len(wanted), set(wanted) - set(positional)


def test_a_name_is_the_same_wherever_torchrec_hands_it_out() -> None:
    assert (
        tierstore.torchrec.EmbeddingBagCollection
        is theirs("modules.embedding_modules").EmbeddingBagCollection
    )
    assert (
        theirs("distributed").DistributedModelParallel
        is theirs("distributed.model_parallel").DistributedModelParallel
    )
    assert (
        theirs("distributed").TrainPipelineSparseDist
        is theirs("distributed.train_pipeline").TrainPipelineSparseDist
    )
    assert theirs("distributed.planner").Topology is theirs("distributed.planner.types").Topology
    assert (
        theirs("distributed.model_parallel").get_default_sharders
        is theirs("distributed.sharding_plan").get_default_sharders
    )


def theirs(path: str) -> Any:
    return import_module(f"tierstore.torchrec.{path}")


def test_the_rest_is_torchrecs_own() -> None:
    assert tierstore.torchrec.KeyedJaggedTensor is torchrec.KeyedJaggedTensor
    assert tierstore.torchrec.EmbeddingBagConfig is torchrec.EmbeddingBagConfig
    assert [f"cat_{n}" for n in range(26)] == theirs("datasets.criteo").DEFAULT_CAT_NAMES
    assert theirs("datasets.utils").Batch is import_module("torchrec.datasets.utils").Batch
    assert theirs("models.dlrm").DLRM is import_module("torchrec.models.dlrm").DLRM
    assert theirs("distributed.types").BoundsCheckMode.WARNING == 1
    assert (
        theirs("distributed.planner").ParameterConstraints
        is import_module("torchrec.distributed.planner").ParameterConstraints
    )
    assert (
        theirs("optim.keyed").KeyedOptimizerWrapper
        is import_module("torchrec.optim.keyed").KeyedOptimizerWrapper
    )
    assert theirs("distributed.comm").get_local_size(1) == import_module(
        "torchrec.distributed.comm"
    ).get_local_size(1)
    assert theirs("optim").RowWiseAdagrad is import_module("torchrec.optim").RowWiseAdagrad


def test_modules_inside_modules_are_mirrored() -> None:
    distributed = theirs("distributed")
    assert distributed.planner.__name__ == "tierstore.torchrec.distributed.planner"
    assert distributed.planner is theirs("distributed.planner")
    assert theirs("distributed.model_parallel").torch is torch


def test_every_module_of_torchrec_can_be_imported() -> None:
    """All that scripts import: no module of a mirror fails where torchrec's does not."""
    paths = ["datasets", "distributed", "models", "modules", "optim", "sparse"]
    for top in paths:
        package = import_module(f"torchrec.{top}")
        for info in pkgutil.iter_modules(package.__path__):
            if info.name in ("benchmark", "test_utils", "scripts"):
                continue
            try:
                import_module(f"torchrec.{top}.{info.name}")
            except Exception:
                continue
            module = theirs(f"{top}.{info.name}")
            for name in dir(module):
                if not name.startswith("__"):
                    assert (
                        getattr(module, name, None) is not None
                        or getattr(theirs_module(module), name, None) is None
                    )


def theirs_module(module: Any) -> Any:
    return import_module(module.__name__.removeprefix("tierstore."))


def test_star_imports_have_ours() -> None:
    found: dict[str, Any] = {}
    exec("from tierstore.torchrec.modules.fused_embedding_modules import *", found)
    assert "FusedEmbeddingBagCollection" not in found
    exec("from tierstore.torchrec.modules.embedding_modules import *", found)
    assert issubclass(found["EmbeddingBagCollection"], tierstore.EmbeddingBagCollection)


def test_what_torchrec_lacks_is_missing_here_as_there() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"tierstore\.torchrec\.distributed\.nothing"):
        import_module("tierstore.torchrec.distributed.nothing")
    with pytest.raises(ModuleNotFoundError):
        import_module("tierstore.torchrec.distributed.comm.nothing")
    with pytest.raises(ImportError, match="nothing"):
        exec("from tierstore.torchrec.distributed import nothing")


def test_files_of_the_mirror_have_no_name_of_torchrec() -> None:
    ours = {path.stem for path in Path(tierstore.torchrec.__file__).parent.glob("*.py")} - {"__init__"}
    assert not [name for name in ours if hasattr(torchrec, name)]
    assert not ours & {info.name for info in pkgutil.iter_modules(torchrec.__path__)}


def test_without_torchrec_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torchrec'] = None\n"
        "from tierstore.errors import MissingPackageError\n"
        "try:\n    import tierstore.torchrec\n"
        "except MissingPackageError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Install torchrec and fbgemm-gpu" in done.stdout
    assert issubclass(MissingPackageError, ImportError)


def test_libraries_of_another_torch_are_told_apart_from_defects_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "fbgemm_gpu.py").write_text("raise OSError('Could not load this library: fbgemm_gpu.so')\n")
    code = (
        "from tierstore.cli import main\nfrom tierstore.errors import MissingPackageError\n"
        "try:\n    import tierstore.torchrec\n"
        "except MissingPackageError as error:\n    print(error)\n"
        "for command in ('kernels', 'baselines --systems=fbgemm --data=synthetic:zipf:1 --steps=1'):\n"
        "    print(main.main(['bench', *command.split(), '--batch-size=4', '--rows=9']))\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        check=True,
    )
    why = "cannot be imported: Could not load this library: fbgemm_gpu.so. Install"
    release = f"of the release that goes with torch {torch.__version__}"
    assert f"{why} torchrec and fbgemm-gpu (or fbgemm-gpu-cpu) {release}" in done.stdout
    assert done.stdout.split()[-2:] == ["2", "2"]
    advice = f"the fbgemm-gpu-cpu and torchrec that go with torch {torch.__version__}"
    assert done.stderr.count(f"{why} {advice}") == 2


def test_jagged_tensors_of_tierstore_are_torchrecs_to_isinstance() -> None:
    assert tierstore.torchrec.EmbeddingBagCollection is not None  # the mirror has been used
    ours = tierstore.KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1]))
    assert isinstance(ours, torchrec.KeyedJaggedTensor)
    assert isinstance(ours["a"], torchrec.JaggedTensor)
    assert isinstance(tierstore.KeyedTensor(["a"], [1], torch.ones(1, 1)), torchrec.KeyedTensor)
    assert not isinstance(ours, torchrec.KeyedTensor)
