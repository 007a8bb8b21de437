"""The layers of docs/design.md: who may import whom. Lower never imports higher."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each layer may import of this project, beside itself; the order is the table's, lowest first.
BASICS = {"errors", "config", "keys", "initializers"}
PROJECT_IMPORTS: dict[str, set[str]] = {
    "cache_policies": set(),
    "errors": set(),
    "keys": {"errors"},
    "config": {"errors", "keys", "cache_policies"},
    "initializers": {"errors"},
    "placement": {"errors"},
    "result_file": {"errors"},
    "planner": {"errors", "config", "placement"},
    "sparse": BASICS,
    "optim": BASICS | {"_core"},
    "store": BASICS | {"_core"},
    "cache": BASICS | {"_core", "cache_policies", "optim", "store"},
    "modules": BASICS | {"_core", "sparse", "optim", "store", "cache"},
    "pipeline": BASICS | {"sparse", "optim", "store", "cache", "modules"},
    "sharding": BASICS | {"_core", "placement", "sparse", "optim", "store", "cache", "modules", "pipeline"},
    "checkpoint": BASICS | {"optim", "store", "cache", "modules", "pipeline"},
    "data": BASICS | {"sparse", "modules"},
    "trace": BASICS | {"sparse", "data", "cache_policies"},
    "models": BASICS | {"sparse", "optim", "modules", "data"},
}
EVERYTHING = {"tierstore", "_core", *PROJECT_IMPORTS}
PROJECT_IMPORTS["tierstore"] = EVERYTHING  # the package's own __init__
PROJECT_IMPORTS["cli"] = EVERYTHING | {"tierstore_bench"}
PROJECT_IMPORTS["bench"] = EVERYTHING

# Layers that live without some third-party packages, or with few.
ONLY_THIRD_PARTY = {
    "cache_policies": {"numpy", "numba", "llvmlite"},
    "sparse": {"torch", "numpy"},
    "planner": {"numpy", "scipy", "torch"},
}
NEVER_IMPORTED = {"store": {"torch"}, "errors": {"torch"}, "keys": {"torch"}}

# Folders of csrc: what each may include of the others.
CORE_INCLUDES = {
    "common": set(),
    "kernels": {"common"},
    "cache": {"common"},
    "io": {"common"},
    "store": {"common", "kernels", "cache", "io"},
    "bindings": {"common", "kernels", "cache", "io", "store"},
}


def python_files() -> list[Path]:
    return sorted(p for top in ("tierstore", "cache_policies", "bench") for p in (ROOT / top).rglob("*.py"))


def layer_of(module: str) -> str:
    """The layer of a dotted module name; for a module outside the project its top-level name."""
    parts = module.split(".")
    if parts[0] == "tierstore":
        return parts[1] if len(parts) > 1 else "tierstore"
    return {"tierstore_bench": "bench"}.get(parts[0], parts[0])


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> set[str]:
    """Dotted names that a file imports, at any depth; ``from tierstore import store`` is tierstore.store."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "tierstore":
                names.update(
                    f"tierstore.{alias.name}" if is_submodule(alias.name) else "tierstore"
                    for alias in node.names
                )
            else:
                names.add(module)
    return names


def is_submodule(name: str) -> bool:
    return (
        name == "_core" or (ROOT / "tierstore" / name).is_dir() or (ROOT / f"tierstore/{name}.py").is_file()
    )


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    layer = layer_of(module_name(path))
    assert layer in PROJECT_IMPORTS, f"{layer} is not in the layer table: put it there and in docs/design.md"
    layers = {layer_of(name) for name in imported_modules(path)} - {layer}
    ours = layers & (EVERYTHING | {"cli", "bench", "tests"})
    assert ours <= PROJECT_IMPORTS[layer], f"{layer} must not import {sorted(ours - PROJECT_IMPORTS[layer])}"
    others = layers - ours - set(sys.stdlib_module_names)
    assert others <= ONLY_THIRD_PARTY.get(layer, others)
    assert not others & NEVER_IMPORTED.get(layer, set())


def core_files() -> list[Path]:
    files = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".cc", ".h"}]
    return sorted(p for p in files if "tests" not in p.relative_to(ROOT).parts)


@pytest.mark.parametrize("path", core_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_core_includes_point_down(path: Path) -> None:
    folder = path.relative_to(ROOT / "csrc").parts[0]
    text = path.read_text(encoding="utf-8")
    includes = re.findall(r'^#include "(\w+)/', text, flags=re.MULTILINE)
    assert set(includes) <= CORE_INCLUDES[folder] | {folder}
    assert not re.search(r"#include <(torch|ATen|c10)/", text), "the core knows no torch"


def test_the_design_names_every_layer() -> None:
    table = (ROOT / "docs/design.md").read_text(encoding="utf-8").split("```")[1]
    assert not [name for name in PROJECT_IMPORTS if not re.search(rf"\b{name}\b", table)]
