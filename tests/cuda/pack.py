"""What takes a compiler on a machine with a GPU, made before on another one: ``make gpu-pack``.

The folder ``gpu-pack`` has the native core for the Python of that machine, and in ``cubins`` every part of
the kernels that its checks and its benchmark load. ``make gpu-build`` uses what is there. Nothing here but
``compile`` needs a package.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / "gpu-pack"
CUBINS = "cubins"
_DRIVER = 99  # no driver is here that could be too old


def cores(pack: Path = PACK) -> list[Path]:
    """Return the cores in the pack."""
    return sorted(pack.glob("_core*.so"))


def core(pack: Path = PACK) -> Path | None:
    """Return the core that this Python loads; None if none is in the pack."""
    found = pack / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    return found if found.exists() else None


def cached(folder: Path | None = None) -> set[str]:
    """Return the names of the compiled parts in the user's cache, or in ``folder``."""
    return {path.name for path in (folder or _cache()).glob("sm_*.cubin")}


def _cache() -> Path:
    """``tierstore.cuda.cubins.cache_folder``, which needs the core that may not be here yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierstore" / CUBINS


def install(pack: Path = PACK, folder: Path | None = None) -> str:
    """Copy the parts of the kernels to the user's cache, or to ``folder``. Return what was done and which
    core will be used, in words; nothing if there is no pack."""
    if not pack.is_dir():
        return ""
    target, here = folder or _cache(), core(pack)
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    brought = sorted((pack / CUBINS).glob("sm_*.cubin"))
    for path in brought:
        whole = target / f"{path.name}.copied"
        shutil.copyfile(path, whole)
        whole.replace(target / path.name)  # a process that is killed leaves no part of a file
    others = ", ".join(path.name for path in cores(pack)) or "what is there"
    said = (
        f"{here.name} is used" if here else f"{others} does not fit {sys.executable}, so the core is compiled"
    )
    return f"{pack.name}: {len(brought)} parts of the kernels are in {target}; {said}"


def _compiled(part: dict[str, Any], architecture: int, nvrtc: Sequence[str], folder: Path) -> int:
    """Compile a part into a folder; return the size of its image."""
    from tierstore.cuda.cubins import CubinCache, Cubins, Part
    from tierstore.cuda.nvrtc import open_nvrtc

    cubins = Cubins(architecture, lambda: open_nvrtc(_DRIVER, nvrtc), CubinCache(folder))
    return len(cubins.get(Part(**part)))


def compile_parts(
    parts: Sequence[dict[str, Any]], architectures: Sequence[int], nvrtc: Sequence[str], folder: Path
) -> int:
    """Compile the parts for each architecture by all processors; return the bytes of all images.

    ``nvrtc``: libraries to choose from. Raises ``GpuError``, and RuntimeError where a file is missing.
    """
    work = [(part, architecture) for architecture in architectures for part in parts]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = [pool.submit(_compiled, part, number, nvrtc, folder) for part, number in work]
        size = sum(one.result() for one in made)
    kept = len(cached(folder))
    if kept != len(work):
        raise RuntimeError(f"{folder} has {kept} files, and {len(work)} were compiled")
    return size


def _parts() -> list[dict[str, Any]]:
    """Ask another process, since processes that are forked from one with torch's threads may hang."""
    command = [sys.executable, "-m", "tests.cuda.parts_of_checks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the parts of the checks are unknown:\n{done.stderr[-3000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("core", help="print the path of the core that this Python loads, if there is one")
    commands.add_parser("install", help="copy the parts of the kernels to the user's cache")
    compiles = commands.add_parser("compile", help="compile all parts of the kernels")
    compiles.add_argument("--arch", type=int, nargs="+", required=True, help="compute capabilities, as 90")
    compiles.add_argument("--nvrtc", type=Path, required=True, help="a folder that has libnvrtc.so*")
    given = parser.parse_args(arguments)
    if given.command == "core":
        print(core() or "")
    elif given.command == "install":
        print(install() or f"{PACK.name} is not here, so the core and the kernels are compiled")
    else:
        begin, parts = time.monotonic(), _parts()
        libraries = sorted(str(path) for path in given.nvrtc.rglob("libnvrtc.so*"))
        known = time.monotonic()
        size = compile_parts(parts, given.arch, libraries, PACK / CUBINS)
        print(
            f"{len(parts)} parts of the kernels, found in {known - begin:.0f} s and compiled for "
            f"{', '.join(f'sm_{number}' for number in given.arch)} in {time.monotonic() - known:.0f} s: "
            f"{size / 1e6:.1f} MB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
