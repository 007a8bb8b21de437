"""Builds the native core. Everything else about the package is in pyproject.toml."""

import fcntl
import functools
import hashlib
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext

# What every file begins with, compiled once.
STANDARD = "csrc/common/standard.h"
# By the seconds of a compiler for a file: the longest are begun first, so that no core is idle at the end.
LONGEST_FIRST = ["csrc/kernels/update_", "csrc/bindings/", "csrc/kernels/"]
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.h"))
# What tierstore/cuda/source.py reads.
KERNELS = ["cuda/args.h", "cuda/*.cu", "cuda/*.cuh", "cuda/nvrtc/*"]
KERNELS += ["kernels/inline.h", "kernels/normal.h", "kernels/philox.h"]


class BuildCore(build_ext):
    """Keeps objects in build/, so that a wheel and an editable install compile a file once."""

    def finalize_options(self) -> None:
        super().finalize_options()
        flags = [os.environ.get(name) for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS")]
        built_with = repr((pybind11.__version__, sys.version, sysconfig.get_path("include"), flags))
        self.build_temp = f"build/objects-{hashlib.sha256(built_with.encode()).hexdigest()[:12]}"

    def run(self) -> None:
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        with open(Path(self.build_temp, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds at a time
            super().run()

    def build_extension(self, ext: Any) -> None:
        """Compile the headers of the standard library first, with the flags of the files that use them.

        ``TIERSTORE_CORE`` names a core that was compiled elsewhere for this Python: it is copied instead.
        """
        if os.environ.get("TIERSTORE_CORE"):
            built = Path(self.get_ext_fullpath(ext.name))
            built.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.environ["TIERSTORE_CORE"], built)
            return
        header = Path(self.build_temp, Path(STANDARD).name)
        compiled = header.with_suffix(".h.gch")
        if not compiled.exists() or is_older(str(compiled), STANDARD):
            shutil.copy(STANDARD, header)  # for compilers that do not find what was compiled
            made = compiled.with_suffix(".made")
            command = [*self.compiler.compiler_so_cxx, *ext.extra_compile_args]
            self.spawn([*command, "-x", "c++-header", str(header), "-o", str(made)])
            made.rename(compiled)
        ext.extra_compile_args += ["-include", str(header)]
        super().build_extension(ext)


@functools.cache
def included(name: str) -> frozenset[str]:
    """Return a file of csrc and the files of csrc that it includes, directly or not."""
    names = re.findall(r'^#include "(.+)"', Path(name).read_text(), re.MULTILINE)
    found = [str(place / each) for each in names for place in (Path("csrc"), Path(name).parent)]
    return frozenset({name}).union(*(included(each) for each in found if Path(each).exists()))


def sources() -> list[str]:
    """Return the files to compile: all but those that another one includes, as those of bindings."""
    found = {str(path) for path in Path("csrc").rglob("*.cc") if "tests" not in path.parts}
    return sorted(found - {part for name in found for part in included(name) if part != name})


def is_older(compiled: str, source: str) -> bool:
    """Return whether an object is older than its source, a file that it includes, or the flags in this
    file."""
    made = os.stat(compiled).st_mtime
    return any(os.stat(name).st_mtime >= made for name in (*included(source), STANDARD, __file__))


class CompileLongestFirst(ParallelCompile):
    """Compiles files in parallel, in an order of its own: setuptools sorts them by name."""

    def function(self) -> Any:
        compile_all = super().function()

        def compile_in_order(compiler: Any, files: list[str], *args: Any, **options: Any) -> Any:
            files = sorted(files, key=lambda name: [not name.startswith(first) for first in LONGEST_FIRST])
            return compile_all(compiler, files, *args, **options)

        return compile_in_order


CompileLongestFirst("TIERSTORE_BUILD_JOBS", needs_recompile=is_older).install()

core = Pybind11Extension(
    "tierstore._core",
    sources(),
    depends=[*HEADERS, *(str(path) for path in Path("csrc").rglob("*.cc"))],
    include_dirs=["csrc"],
    cxx_std=20,
    # Contraction to FMA differs between instruction sets, so it would break bit-exactness between the
    # run-time dispatched versions of a kernel; -fno-math-errno lets sqrt vectorise.
    extra_compile_args=["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-pthread"],
    extra_link_args=["-pthread"],
)

setup(
    ext_modules=[core],
    cmdclass={"build_ext": BuildCore},
    packages=[
        *find_packages(include=["tierstore*", "cache_policies*"]),
        *("tierstore_bench", "tierstore_bench.research", "tierstore.cuda.kernel_source"),
    ],
    package_dir={"tierstore_bench": "bench", "tierstore.cuda.kernel_source": "csrc"},
    package_data={"tierstore.cuda.kernel_source": KERNELS},
)
