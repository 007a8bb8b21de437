"""NVRTC, NVIDIA's compiler as a library: finds it on this machine, and compiles source to machine code."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

from tierstore.cuda.source import KernelSource
from tierstore.errors import GpuError

_OLDEST = 12
_LOG_LINES = 12
_FUNCTIONS: dict[str, list[type]] = {
    "nvrtcVersion": [POINTER(c_int), POINTER(c_int)],
    "nvrtcGetNumSupportedArchs": [POINTER(c_int)],
    "nvrtcGetSupportedArchs": [POINTER(c_int)],
    "nvrtcCreateProgram": [
        *(POINTER(c_void_p), c_char_p, c_char_p, c_int),
        *(POINTER(c_char_p), POINTER(c_char_p)),
    ],
    "nvrtcCompileProgram": [c_void_p, c_int, POINTER(c_char_p)],
    "nvrtcGetProgramLogSize": [c_void_p, POINTER(c_size_t)],
    "nvrtcGetProgramLog": [c_void_p, c_char_p],
    "nvrtcGetCUBINSize": [c_void_p, POINTER(c_size_t)],
    "nvrtcGetCUBIN": [c_void_p, c_char_p],
    "nvrtcDestroyProgram": [POINTER(c_void_p)],
}


def _folders() -> Iterator[Path]:
    """Yield folders that may have the library: of NVIDIA's Python packages, which torch for CUDA brings, and
    of CUDA toolkits."""
    packages = importlib.util.find_spec("nvidia")
    for root in (packages.submodule_search_locations if packages else None) or ():
        yield from sorted(Path(root).glob("*/lib"), reverse=True)
    for toolkit in ("CUDA_HOME", "CUDA_PATH"):
        if toolkit in os.environ:
            yield Path(os.environ[toolkit]) / "lib64"
    yield Path("/usr/local/cuda/lib64")


def candidates() -> Iterator[str]:
    """Yield libraries that may be NVRTC, the best first."""
    for folder in _folders():
        yield from map(str, sorted(folder.glob("libnvrtc.so*"), reverse=True))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def _opened(library: str) -> Nvrtc | None:
    # NVRTC opens its builtins by their bare name, which finds them only if they are loaded already.
    for builtins in Path(library).parent.glob("libnvrtc-builtins.so*") if "/" in library else ():
        try:
            ctypes.CDLL(str(builtins))
        except OSError:
            return None
    try:
        return Nvrtc(ctypes.CDLL(library))
    except (OSError, AttributeError):
        return None


def open_nvrtc(driver_major: int, libraries: Sequence[str] | None = None) -> Nvrtc:
    """Return an NVRTC of this machine whose machine code a driver for CUDA ``driver_major`` runs.

    ``libraries``: the ones to try; None: those that are found. Raises ``GpuError``.
    """
    tried = list(candidates() if libraries is None else libraries)
    found = [nvrtc for nvrtc in map(_opened, tried) if nvrtc is not None]
    for nvrtc in found:
        if _OLDEST <= nvrtc.version[0] <= driver_major:
            return nvrtc
    if not found:
        raise GpuError(
            "no NVRTC is here, the compiler of the GPU kernels: libnvrtc.so was looked for in NVIDIA's "
            "Python packages, in CUDA_HOME and in the system's libraries. Install torch for CUDA, or run "
            "pip install nvidia-cuda-nvrtc"
        )
    versions = ", ".join(".".join(map(str, nvrtc.version)) for nvrtc in found)
    raise GpuError(
        f"the NVRTC that is here ({versions}) does not go with the driver, which is for CUDA {driver_major}: "
        f"NVRTC must be of CUDA {_OLDEST} to {driver_major}. Install one of these, or a newer driver"
    )


class Nvrtc:
    """The functions of the library. Raises AttributeError for a library that lacks some."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, types in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, c_int
        major, minor = c_int(), c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        self.version = major.value, minor.value

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            raise GpuError(f"{name} of NVRTC failed with error {code}")

    def architectures(self) -> list[int]:
        """Return the compute capabilities that this NVRTC compiles for, such as 90 for sm_90."""
        count = c_int()
        self._call("nvrtcGetNumSupportedArchs", byref(count))
        numbers = (c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return sorted(numbers)

    def compile(self, source: KernelSource, architecture: int, options: Sequence[str]) -> bytes:
        """Return the machine code (a cubin) of ``source`` for compute capability ``architecture``.

        Raises ``GpuError`` where it does not compile.
        """
        known = self.architectures()
        if architecture not in known:
            raise GpuError(
                f"NVRTC {'.'.join(map(str, self.version))} does not compile for this GPU (sm_{architecture}),"
                f" only for sm_{', sm_'.join(map(str, known))}. For a newer GPU install a newer torch or "
                "nvidia-cuda-nvrtc; GPUs older than sm_75 are not supported"
            )
        program = self._program(source)
        try:
            given = [f"--gpu-architecture=sm_{architecture}", *options]
            texts = (c_char_p * len(given))(*(option.encode() for option in given))
            if self._library.nvrtcCompileProgram(program, len(given), texts):
                raise self._failure(program, given)
            return self._text(program, "CUBIN")
        finally:
            self._call("nvrtcDestroyProgram", byref(program))

    def _program(self, source: KernelSource) -> c_void_p:
        program, count = c_void_p(), len(source.headers)
        texts = (c_char_p * count)(*(text.encode() for text in source.headers.values()))
        names = (c_char_p * count)(*(name.encode() for name in source.headers))
        self._call(
            "nvrtcCreateProgram", byref(program), source.main.encode(), b"kernels.cu", count, texts, names
        )
        return program

    def _text(self, program: c_void_p, what: str) -> bytes:
        size = c_size_t()
        self._call(f"nvrtcGet{what}Size", program, byref(size))
        room = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, room)
        return room.raw

    def _failure(self, program: c_void_p, options: Sequence[str]) -> GpuError:
        log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip().splitlines()
        more = [f"... and {len(log) - _LOG_LINES} lines more"] if len(log) > _LOG_LINES else []
        return GpuError(
            f"NVRTC {'.'.join(map(str, self.version))} did not compile the GPU kernels with "
            f"{' '.join(options)}. Please report it with this log, and try another release of "
            "nvidia-cuda-nvrtc:\n" + "\n".join([*log[:_LOG_LINES], *more])
        )
