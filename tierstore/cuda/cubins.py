"""Machine code of the kernels: compiled at first use, and kept on disk for later processes."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.cuda.args import WEIGHTS
from tierstore.cuda.nvrtc import Nvrtc
from tierstore.cuda.source import KernelSource, kernel_source

logger = logging.getLogger("tierstore")

OPTIONS = ("--std=c++20", "--fmad=false", "-default-device")
"""Options of NVRTC; without ``--fmad=false`` results would not have the CPU's bits."""
_MAGIC = b"TSCUBIN1"


@dataclass(frozen=True)
class Part:
    """A part of the kernels that is compiled by itself (csrc/cuda/kernels.cu).

    No ``dim``: the kernels of any row layout. No ``optimizer``: lookups of rows of ``dim`` weights of the
    dtype ``weights`` in words of ``vec``. Else the updates of such rows.
    """

    dim: int | None = None
    vec: int | None = None
    optimizer: int | None = None
    weights: str = "fp32"

    def defines(self) -> list[str]:
        """Return the macros that choose the part, as options of the compiler."""
        weights = None if self.dim is None else WEIGHTS[self.weights]
        macros = {"DIM": self.dim, "VEC": self.vec, "OPTIMIZER": self.optimizer, "WEIGHTS": weights}
        return [f"-DTIERSTORE_{name}={value}" for name, value in macros.items() if value is not None]


def cache_folder() -> Path:
    """Return the folder of the user's cache for cubins; one that cannot be made for a user without a home."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        cache = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:  # a container runs as a user that it does not know
        cache = Path(os.devnull)
    return cache / "tierstore" / "cubins"


class CubinCache:
    """Files of machine code by key. Several processes may use one folder: a file is whole or not there.

    A folder that cannot be written costs a warning and a compilation per process.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = cache_folder() if folder is None else folder
        self._warned = False

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.cubin"

    def get(self, key: str) -> bytes | None:
        """Return the image of ``key``; None if it is not there or damaged."""
        try:
            entry = self._path(key).read_bytes()
        except OSError:
            return None
        begin = len(_MAGIC) + 32
        image = entry[begin:]
        if entry[:begin] == _MAGIC + hashlib.sha256(image).digest():
            return image
        logger.warning("%s is damaged and is compiled again", self._path(key))
        return None

    def put(self, key: str, image: bytes) -> None:
        """Keep ``image``, in the place of another one of the key if there is one."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder)
            try:
                with open(handle, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(image).digest() + image)
                os.replace(name, self._path(key))
            except BaseException:
                os.unlink(name)
                raise
        except OSError as refused:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s: GPU kernels cannot be kept (%s), so each process compiles them. XDG_CACHE_HOME "
                    "chooses another folder",
                    self.folder,
                    refused,
                )


class Cubins:
    """Machine code of every part for one compute capability (``architecture``)."""

    def __init__(
        self,
        architecture: int,
        nvrtc: Callable[[], Nvrtc],
        cache: CubinCache | None = None,
        source: KernelSource | None = None,
    ) -> None:
        self.architecture = architecture
        self._nvrtc = nvrtc
        self._cache = CubinCache() if cache is None else cache
        self._source = kernel_source() if source is None else source

    def _options(self, part: Part) -> Sequence[str]:
        return [*OPTIONS, *part.defines()]

    def key(self, part: Part) -> str:
        """Return what the part's image depends on, as a name of a file."""
        named = "\0".join([self._source.digest, *self._options(part)])
        return f"sm_{self.architecture}-{hashlib.sha256(named.encode()).hexdigest()[:40]}"

    def get(self, part: Part, *, again: bool = False) -> bytes:
        """Return the part's image. ``again``: compile it even if it is kept, since the driver refuses it.

        Raises ``GpuError`` where it has to be compiled and cannot be.
        """
        key = self.key(part)
        image = None if again else self._cache.get(key)
        if image is None:
            image = self._nvrtc().compile(self._source, self.architecture, self._options(part))
            self._cache.put(key, image)
        return image
