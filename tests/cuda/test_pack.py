"""What ``make gpu-pack`` makes, by the fake NVRTC, and what ``make gpu-build`` does with it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.cuda import pack
from tests.cuda.compiled import shared_library
from tierstore.cuda.cubins import CubinCache, Cubins, Part, cache_folder
from tierstore.cuda.nvrtc import Nvrtc
from tierstore.errors import GpuError

ROOT = pack.ROOT
PARTS = [Part(), Part(64, 4), Part(64, 4, 1, "bf16")]


def compiled(folder: Path, architectures: list[int]) -> int:
    nvrtc = [str(shared_library("fake_nvrtc"))]
    return pack.compile_parts([asdict(part) for part in PARTS], architectures, nvrtc, folder)


def test_parts_are_found_without_a_compiler(tmp_path: Path) -> None:
    def missing() -> Nvrtc:
        raise AssertionError("NVRTC is wanted")

    size = compiled(tmp_path / "pack" / "cubins", [80, 90])
    said = pack.install(tmp_path / "pack", tmp_path / "cache")
    assert said.startswith(
        f"pack: 6 parts of the kernels are in {tmp_path / 'cache'}; what is there does not fit"
    )
    assert pack.cached(tmp_path / "cache") == pack.cached(tmp_path / "pack" / "cubins")
    images = [
        Cubins(number, missing, CubinCache(tmp_path / "cache")).get(part)
        for number in (80, 90)
        for part in PARTS
    ]
    assert sum(map(len, images)) == size


def test_parts_that_do_not_compile_end_it(tmp_path: Path) -> None:
    with pytest.raises(GpuError, match="sm_50"):
        compiled(tmp_path, [50])


def test_a_folder_that_cannot_be_written_ends_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="0 files, and 3 were compiled"):
        compiled(tmp_path / "file" / "cubins", [90])


def test_the_core_must_fit_this_python(tmp_path: Path) -> None:
    folder = tmp_path / "gpu-pack"
    assert pack.install(folder, tmp_path / "cache") == ""
    folder.mkdir()
    (folder / "_core.cpython-27-other.so").touch()
    assert pack.core(folder) is None
    said = pack.install(folder, tmp_path / "cache")
    assert f"_core.cpython-27-other.so does not fit {sys.executable}, so the core is compiled" in said
    fits = folder / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    fits.touch()
    assert pack.core(folder) == fits
    assert pack.install(folder, tmp_path / "cache").endswith(f"{fits.name} is used")


@pytest.mark.parametrize("chosen", [True, False])
def test_the_cache_is_the_users(chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if chosen:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    compiled(tmp_path / "pack" / "cubins", [90])
    pack.install(tmp_path / "pack")
    assert len(pack.cached()) == 3
    assert pack.cached(cache_folder()) == pack.cached()


def test_the_core_is_copied_and_not_compiled(tmp_path: Path) -> None:
    """As `pip install --editable` does, by setup.py."""
    brought = tmp_path / "_core.so"
    brought.write_bytes(b"a core")
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(tmp_path / "built")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TIERSTORE_CORE": str(brought), "CXX": "no-such-compiler"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [core] = (tmp_path / "built" / "tierstore").glob("_core*.so")
    assert core.read_bytes() == b"a core"


def test_targets_of_make_use_the_pack() -> None:
    def said(*targets: str) -> str:
        done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout

    build = said("gpu-build")
    assert build.index("check_gpu --needs") < build.index("pack install") < build.index("--editable")
    assert "TIERSTORE_CORE=$(python3 -m tests.cuda.pack core)" in build
    making = said("gpu-pack", "GPU_PYTHON=/opt/python", "GPU_ARCH=90 100", "GPU_NVRTC=13.1.2")
    for part in ("/opt/python -m venv", "--arch 90 100 ", "nvidia-cuda-nvrtc==13.1.2"):
        assert part in making
    assert " gpu-pack " in said("clean")
