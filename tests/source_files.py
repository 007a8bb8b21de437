"""The project's Python files, and what they import."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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


@functools.lru_cache(maxsize=1)  # all files would take hundreds of MiB
def syntax(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def package_of(path: Path) -> str:
    name = module_name(path)
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


@functools.cache
def imports(path: Path) -> list[tuple[str, str]]:
    """Module and name of each ``from module import name``, at any depth; "" of each ``import module``."""
    package, found = package_of(path).split("."), []
    for node in syntax(path):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(module, alias.name) for alias in node.names]
    return found


FILES = {module_name(path): path for path in python_files()}
