"""Packages, tests and examples use public names of one another."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import source_files
from tests.source_files import FILES, ROOT, imports, package_of, syntax

OURS = {"tierstore", "tierstore_bench", "bench", "cache_policies"}

# Packages that use what another keeps private: benchmarks for makers measure as those for users do.
PART_OF = {"bench.research": "bench"}

# What torch, NumPy, numba, lmdb or Python keep private, and nothing public tells.
_OTHERS = """
_C _Database _are_functorch_transforms_active _asdict _cache _current_autograd_node _disable_dynamo _exit
_cdata _execution_engine _get_active_ddp_module _get_backend _getframe
_init_from_local_shards_and_global_metadata
_is_owned _mmap _modules _parameters _register_effectful_op _scale _sleep _timeout _version
_will_engine_execute_node
"""
OTHERS_PRIVATE = set(_OTHERS.split())


def test_packages_keep_what_is_private() -> None:
    """A name or module that begins with an underscore is for the files of its own folder."""
    found = set()
    for importer, path in FILES.items():
        for module, name in imports(path):
            parts = f"{module}.{name}".replace("tierstore_bench", "bench").split(".")
            private = [i for i, part in enumerate(parts) if part.startswith("_") and part[:2] != "__"]
            if not private or parts[0] not in OURS or "_core" in parts:
                continue
            owner = ".".join(parts[: private[0]])
            if package_of(FILES[owner]) not in (package_of(path), PART_OF.get(package_of(path))):
                found.add((importer, ".".join(parts)))
    assert not found, "import public names"


def private_imports(path: Path) -> set[str]:
    """Private names of this project that a file imports; the native module and modules of bench/ are none."""
    found = set()
    for module, name in imports(path):
        top, whole = module.split(".")[0], f"{module}.{name}".replace("tierstore_bench", "bench")
        private = is_private(name) or (top in ("tierstore", "cache_policies") and is_private(module))
        if top in OURS and private and not (top == "bench" and whole in FILES) and "_core" not in whole:
            found.add(f"{module}.{name}")
    return found


def is_private(name: str) -> bool:
    """Whether a part of a dotted name begins with one underscore."""
    return any(part.startswith("_") and part[:2] != "__" for part in name.split("."))


def test_tests_and_examples_import_public_names() -> None:
    paths = [path for top in ("tests", "examples") for path in (ROOT / top).rglob("*.py")]
    assert len(paths) > 300
    found = {str(path.relative_to(ROOT)): private_imports(path) for path in paths}
    assert not {path: names for path, names in found.items() if names}, "import public names"


def test_private_imports_of_tests_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "imports.py"
    path.write_text(
        "from tierstore import _core\n"
        "from tierstore.modules.inputs import _check_gpu, checked_ids\n"
        "from bench._threads import ThreadSeconds\n"
        "from bench._steady import _print\n"
        "from numpy import _globals\n"
    )
    monkeypatch.setattr(source_files, "ROOT", tmp_path)
    assert private_imports(path) == {"tierstore.modules.inputs._check_gpu", "bench._steady._print"}


def private_attributes(path: Path) -> set[str]:
    """Private attributes that a file asks of other objects than ``self``, ``getattr`` included."""
    found = set()
    for node in syntax(path):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            found |= {str(name.value) for name in node.args[1:2] if isinstance(name, ast.Constant)}
    return {name for name in found if name.startswith("_") and name[:2] != "__"}


def defined_names(path: Path) -> set[str]:
    """Names that a file gives: to functions and classes, variables and fields, and attributes of ``self``."""
    found = set()
    for node in syntax(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


def test_packages_ask_objects_of_others_for_nothing_private() -> None:
    defined: dict[str, set[str]] = {}
    for path in FILES.values():
        defined.setdefault(package_of(path), set()).update(defined_names(path))
    found = {
        f"{importer}: {name}"
        for importer, path in FILES.items()
        for name in private_attributes(path) - defined[package_of(path)] - OTHERS_PRIVATE
    }
    assert not found, "ask for something public"
    assert not OTHERS_PRIVATE - set().union(*map(private_attributes, FILES.values()))


def test_private_attributes_are_found(tmp_path: Path) -> None:
    path = tmp_path / "asks.py"
    path.write_text(
        "class Asks:\n"
        "    def __init__(self, other):\n"
        "        self._own = other._theirs\n"
        "        self.inner = getattr(other.inner, '_hidden')\n"
        "        self.inner._deep = other.__class__\n"
    )
    assert private_attributes(path) == {"_theirs", "_hidden", "_deep"}
    assert defined_names(path) == {"Asks", "__init__", "_own", "inner"}
