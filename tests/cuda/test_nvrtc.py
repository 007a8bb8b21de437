"""Kernels are compiled at first use and kept on disk. The fake NVRTC compiles nothing, so these tests also
run with a real one where the machine has it."""

from __future__ import annotations

import ctypes
import functools
import logging
import multiprocessing
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cuda.compiled import shared_library
from tierstore import GpuError
from tierstore.cuda import nvrtc
from tierstore.cuda.cubins import OPTIONS, CubinCache, Cubins, Part, cache_folder
from tierstore.cuda.nvrtc import Nvrtc, open_nvrtc
from tierstore.cuda.source import KernelSource, kernel_source

PARTS = [Part(), Part(64, 4), Part(17, 1), Part(64, 4, 1), Part(17, 1, 3)]
KERNELS = {Part(): b"move_rows", Part(64, 4): b"lookup_pooled", Part(64, 4, 1): b"update_cold"}
BROKEN = KernelSource("#error no kernels here\n", {})


@functools.cache
def fake() -> str:
    return str(shared_library("fake_nvrtc"))


def real() -> list[str]:
    """The NVRTC of this machine, if it has one."""
    try:
        open_nvrtc(99)
    except GpuError:
        return []
    return ["real"]


def compilations() -> int:
    count: int = ctypes.CDLL(fake()).fake_nvrtc_compilations()
    return count


@pytest.fixture(params=["fake", *real()])
def compiler(request: pytest.FixtureRequest) -> Nvrtc:
    return open_nvrtc(13, [fake()] if request.param == "fake" else None)


def cubins(folder: Path, compiler: Nvrtc | None = None, architecture: int = 90) -> Cubins:
    found = compiler or open_nvrtc(13, [fake()])
    return Cubins(architecture, lambda: found, CubinCache(folder))


@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_every_part_compiles(compiler: Nvrtc, architecture: int, tmp_path: Path) -> None:
    made = cubins(tmp_path, compiler, architecture)
    images = [made.get(part) for part in PARTS]
    assert len(set(images)) == len(PARTS)
    for part, kernel in KERNELS.items():
        image = images[PARTS.index(part)]
        is_fake = image.startswith(b"fake cubin\n")
        assert is_fake or (image.startswith(b"\x7fELF") and kernel in image)
        assert not is_fake or f"sm_{architecture}\n".encode() in image
        assert not is_fake or all(option.encode() in image for option in (*OPTIONS, *part.defines()))


def test_a_source_that_does_not_compile_is_named(compiler: Nvrtc) -> None:
    with pytest.raises(GpuError, match=r"(?s)did not compile .*--fmad=false.*no kernels here"):
        compiler.compile(BROKEN, 90, OPTIONS)


def test_a_gpu_that_is_not_supported_is_named(compiler: Nvrtc) -> None:
    with pytest.raises(GpuError, match=r"does not compile for this GPU \(sm_35\), only for sm_.*newer"):
        compiler.compile(kernel_source(), 35, OPTIONS)


def test_no_nvrtc_is_named() -> None:
    with pytest.raises(GpuError, match="pip install nvidia-cuda-nvrtc"):
        open_nvrtc(13, ["/nowhere/libnvrtc.so.13", "libnvrtc-of-nobody.so"])
    with pytest.raises(GpuError, match="pip install nvidia-cuda-nvrtc"):
        open_nvrtc(13, ["libc.so.6"])  # a library, but not this one


@pytest.fixture
def other_version() -> Iterator[ctypes.CDLL]:
    library = ctypes.CDLL(fake())
    yield library
    library.fake_nvrtc_set_version(13)


def test_an_nvrtc_that_does_not_go_with_the_driver_is_named(other_version: ctypes.CDLL) -> None:
    for version, driver, fits in [(12, 12, True), (12, 13, True), (13, 12, False), (11, 13, False)]:
        other_version.fake_nvrtc_set_version(version)
        if fits:
            assert open_nvrtc(driver, [fake()]).version == (version, 0)
        else:
            with pytest.raises(GpuError, match=rf"{version}\.0.*for CUDA {driver}: .* 12 to {driver}"):
                open_nvrtc(driver, [fake()])


def test_pythons_packages_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (folder / "libnvrtc.so.13").symlink_to(fake())
    monkeypatch.syspath_prepend(str(tmp_path))
    found = list(nvrtc.candidates())
    assert str(folder / "libnvrtc.so.13") in found
    assert found[-3:] == ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    assert open_nvrtc(13).version[0] >= 12


def test_a_part_is_compiled_once(tmp_path: Path) -> None:
    before, made = compilations(), cubins(tmp_path)
    images = [made.get(part) for part in (*PARTS, *PARTS)]
    assert images[: len(PARTS)] == images[len(PARTS) :]
    assert [cubins(tmp_path).get(part) for part in PARTS] == images[: len(PARTS)]
    assert compilations() - before == len(PARTS)


def test_the_key_has_all_that_the_image_depends_on(tmp_path: Path) -> None:
    source = kernel_source()
    changed = replace(source, headers={**source.headers, "cuda/args.h": source.headers["cuda/args.h"] + "\n"})
    keys = [cubins(tmp_path).key(part) for part in PARTS]
    keys += [cubins(tmp_path, architecture=80).key(Part())]
    keys += [Cubins(90, lambda: open_nvrtc(13), CubinCache(tmp_path), changed).key(Part())]
    assert len(set(keys)) == len(keys)


def test_what_is_kept_needs_no_compiler(tmp_path: Path) -> None:
    image = cubins(tmp_path).get(Part())

    def missing() -> Nvrtc:
        raise GpuError("no NVRTC is here")

    later = Cubins(90, missing, CubinCache(tmp_path))
    assert later.get(Part()) == image
    with pytest.raises(GpuError, match="no NVRTC"):
        later.get(Part(64, 4))


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "other"])
def test_a_damaged_entry_is_compiled_again(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = cubins(tmp_path)
    image = made.get(Part())
    (path,) = tmp_path.iterdir()
    entry = path.read_bytes()
    middle = len(entry) // 2
    flipped = entry[:middle] + bytes([entry[middle] ^ 1]) + entry[middle + 1 :]
    path.write_bytes({"cut": entry[:-1], "empty": b"", "flipped": flipped, "other": image}[damage])
    before = compilations()
    with caplog.at_level(logging.WARNING, "tierstore"):
        assert made.get(Part()) == image
    assert f"{path} is damaged" in caplog.text
    assert (compilations() - before, path.read_bytes()) == (1, entry)
    assert made.get(Part(), again=True) == image  # whole, and refused by the driver
    assert compilations() - before == 2


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    made = cubins(tmp_path / "file" / "folder")
    with caplog.at_level(logging.WARNING, "tierstore"):
        assert made.get(Part()) == made.get(Part())
    assert caplog.text.count("cannot be kept") == 1
    assert "XDG_CACHE_HOME" in caplog.text


def test_the_folder_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "tierstore" / "cubins"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "tierstore" / "cubins"
    made = Cubins(90, lambda: open_nvrtc(13, [fake()]))
    made.get(Part())
    (entry,) = cache_folder().iterdir()
    assert entry.suffix == ".cubin"
    assert stat.S_IMODE(cache_folder().stat().st_mode) & 0o077 == 0


def test_a_user_without_a_home_compiles_in_each_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container that runs as a number."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    made = Cubins(90, lambda: open_nvrtc(13, [fake()]))
    with caplog.at_level(logging.WARNING, "tierstore"):
        assert made.get(Part()) == made.get(Part())
    assert "cannot be kept" in caplog.text
    assert "XDG_CACHE_HOME" in caplog.text


def _compile_often(folder: Path, seed: int) -> bool:
    made = cubins(folder)
    expected = [made.get(part) for part in PARTS]
    for turn in range(60):
        part = (turn + seed) % len(PARTS)
        path = folder / f"{made.key(PARTS[part])}.cubin"
        if turn % 7 == seed % 7:
            path.unlink(missing_ok=True)
        if made.get(PARTS[part]) != expected[part]:
            return False
    return True


def test_several_processes_use_one_folder(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.starmap(_compile_often, [(tmp_path, seed) for seed in range(3)]) == [True] * 3
    assert {path.suffix for path in tmp_path.iterdir()} == {".cubin"}  # nothing half-written is left
    assert len(os.listdir(tmp_path)) <= len(PARTS)
