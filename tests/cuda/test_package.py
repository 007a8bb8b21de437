"""What a wheel has of the kernels: the source that NVRTC gets, and nothing else of csrc."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from tests.cuda.compiled import ROOT
from tierstore.cuda import source

PYBIND11 = """
class ParallelCompile:
    def __init__(self, name, needs_recompile): pass
    def install(self): pass

def Pybind11Extension(name, sources, cxx_std, **options):
    from setuptools import Extension
    return Extension(name, sources, **options)
"""


def test_a_wheel_has_the_source_of_the_kernels(tmp_path: Path) -> None:
    """Modules are built here; pybind11 is not needed for them, and not always here."""
    (tmp_path / "pybind11").mkdir()
    (tmp_path / "pybind11" / "__init__.py").write_text('__version__ = "3"')
    (tmp_path / "pybind11" / "setup_helpers.py").write_text(PYBIND11)
    built = tmp_path / "built"
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", built]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    root = built / "tierstore" / "cuda" / "kernel_source"
    files = {str(path.relative_to(root)) for path in root.glob("**/*") if path.is_file()}
    assert files == {source.MAIN, *source.HEADERS, *(f"cuda/nvrtc/{name}" for name in source.STAND_INS)}
    with mock.patch.object(source, "__file__", str(root.parent / "source.py")):
        assert source.folder() == root
        assert source.kernel_source.__wrapped__() == source.kernel_source()
