"""Builds the native core. Everything else about the package is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import find_packages, setup

ParallelCompile("TIERSTORE_BUILD_JOBS").install()

SOURCES = sorted(str(path) for path in Path("csrc").rglob("*.cc") if "tests" not in path.parts)
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.h"))
# What tierstore/cuda/source.py reads.
KERNELS = ["cuda/args.h", "cuda/*.cu", "cuda/*.cuh", "cuda/nvrtc/*"]
KERNELS += ["kernels/inline.h", "kernels/normal.h", "kernels/philox.h"]

core = Pybind11Extension(
    "tierstore._core",
    SOURCES,
    depends=HEADERS,
    include_dirs=["csrc"],
    cxx_std=20,
    # Contraction to FMA differs between instruction sets, so it would break bit-exactness between the
    # run-time dispatched versions of a kernel; -fno-math-errno lets sqrt vectorise.
    extra_compile_args=["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-pthread"],
    extra_link_args=["-pthread"],
)

setup(
    ext_modules=[core],
    packages=[
        *find_packages(include=["tierstore*", "cache_policies*"]),
        *("tierstore_bench", "tierstore_bench.research", "tierstore.cuda.kernel_source"),
    ],
    package_dir={"tierstore_bench": "bench", "tierstore.cuda.kernel_source": "csrc"},
    package_data={"tierstore.cuda.kernel_source": KERNELS},
)
