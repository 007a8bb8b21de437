"""The layers of docs/design.md: lower ones never import higher ones, and no files import in a circle."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_files import FILES, ROOT, imports, layer_of, module_name, python_files, syntax

# What each layer may import of this project, beside itself; the order is the table's, lowest first.
BASICS = {"errors", "config", "folders", "keys", "initializers", "row_format", "threads"}
PROJECT_IMPORTS: dict[str, set[str]] = {
    "cache_policies": set(),
    "errors": set(),
    "keys": {"errors"},
    "folders": {"errors"},
    "row_format": {"errors"},
    "config": {"errors", "folders", "keys", "row_format", "cache_policies"},
    "default_config": {"errors", "config"},
    "initializers": {"errors"},
    "placement": {"errors"},
    "default_planner": {"placement"},
    "result_file": {"errors"},
    "rounds": set(),
    "threads": set(),
    "planner": {"errors", "config", "placement", "rounds", "row_format"},
    "sparse": BASICS,
    "optim": BASICS | {"_core"},
    "store": BASICS | {"_core"},
    "cuda": {"errors", "config", "row_format", "_core"},
    "cache": BASICS | {"_core", "cache_policies", "optim", "rounds", "store"},
    "modules": BASICS | {"_core", "default_config", "sparse", "optim", "store", "cache", "cuda"},
    "pipeline": BASICS
    | {"_core", "cache_policies", "sparse", "optim", "rounds", "store", "cache", "modules"},
    "sharding": BASICS
    | {"_core", "placement", "default_planner", "rounds", "sparse", "optim", "store", "cache", "modules"}
    | {"pipeline"},
    "checkpoint": BASICS | {"optim", "store", "cache", "modules", "pipeline"},
    "data": BASICS | {"cache_policies", "sparse", "modules"},
    "trace": BASICS | {"sparse", "data", "cache_policies"},
    "simulation": BASICS
    | {
        "cache",
        "data",
        "modules",
        "optim",
        "pipeline",
        "placement",
        "planner",
        "sharding",
        "sparse",
        "trace",
    },
    "models": BASICS | {"sparse", "optim", "modules", "data"},
}
# The mirror of torchrec, which imports torchrec itself, too: both are called "torchrec" here.
PROJECT_IMPORTS["torchrec"] = BASICS | {
    *("default_config", "placement", "planner", "optim", "sparse", "modules", "pipeline", "sharding")
}
PROJECT_IMPORTS["integrations"] = BASICS | {"checkpoint", "modules", "optim", "store", "cache"}
EVERYTHING = {"tierstore", "_core", *PROJECT_IMPORTS}
PROJECT_IMPORTS["tierstore"] = EVERYTHING  # the package's own __init__
PROJECT_IMPORTS["cli"] = EVERYTHING | {"tierstore_bench"}
PROJECT_IMPORTS["bench"] = EVERYTHING - {"_core"}  # benchmarks measure through public names

# Layers that live without some third-party packages, or with few.
ONLY_THIRD_PARTY = {
    "cache_policies": {"numpy", "numba", "llvmlite"},
    "sparse": {"torch", "numpy"},
    "planner": {"numpy", "scipy", "torch"},
}
NEVER_IMPORTED = {
    layer: {"torch"} for layer in ("store", "cache", "cuda", "placement", "default_planner", "errors", "keys")
}

MAX_PARAMETERS = 6
# Classes whose constructors have the parameters of torch's or torchrec's.
LIKE_TORCH = {
    "TieredEmbedding",
    "TieredEmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "KeyedJaggedTensor",
    "DistributedModelParallel",
    "DCNv2",
    "EmbeddingShardingPlanner",
    "EvalPipelineSparseDist",
    "PrefetchTrainPipelineSparseDist",
    "Topology",
    "TrainPipelineSparseDist",
}

# Packages whose signatures say their types; at most so many ``Any`` are left in all.
TYPED = ("cache", "cuda", "modules", "store")
MAX_ANY = 29

# Folders of csrc: what each may include of the others.
CORE_INCLUDES = {
    "common": set(),
    "kernels": {"common"},
    "cuda": {"kernels"},
    "cache": {"common"},
    "io": {"common"},
    "store": {"common", "kernels", "cache", "io"},
    "bindings": {"common", "kernels", "cache", "io", "store"},
}


def imported_modules(path: Path) -> set[str]:
    """Dotted names that a file imports; ``from tierstore import store`` is tierstore.store."""
    return {
        f"tierstore.{name}" if module == "tierstore" and is_submodule(name) else module
        for module, name in imports(path)
    }


def is_submodule(name: str) -> bool:
    return (
        name == "_core" or (ROOT / "tierstore" / name).is_dir() or (ROOT / f"tierstore/{name}.py").is_file()
    )


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    """Imports by name, too."""
    layer = layer_of(module_name(path))
    assert layer in PROJECT_IMPORTS, f"{layer} is not in the layer table: put it there and in docs/design.md"
    layers = {layer_of(name) for name in imported_modules(path)} - {layer}
    ours = layers & (EVERYTHING | {"cli", "bench", "tests"})
    assert ours <= PROJECT_IMPORTS[layer], f"{layer} must not import {sorted(ours - PROJECT_IMPORTS[layer])}"
    others = layers - ours - set(sys.stdlib_module_names)
    assert others <= ONLY_THIRD_PARTY.get(layer, others)
    assert not others & NEVER_IMPORTED.get(layer, set())
    named = {layer_of(name) for name in named_modules(path)} - {layer}
    wrong = named - PROJECT_IMPORTS[layer]
    assert not wrong, f"{layer} must not import {sorted(wrong)}"


def named_modules(path: Path) -> set[str]:
    """Modules of this project that a file's strings name, such as "tierstore.store.native:NativeStore": what
    a file imports by its name is an import, too."""
    constants = [node.value for node in syntax(path) if isinstance(node, ast.Constant)]
    named = {text.partition(":")[0] for text in constants if isinstance(text, str) and "." in text}
    return named & {*FILES, "tierstore._core"}


def test_names_of_modules_are_found(tmp_path: Path) -> None:
    path = tmp_path / "loads.py"
    path.write_text('A, B = "tierstore.planner.planner", ["tierstore.store.native:NativeStore", "no.name"]\n')
    assert named_modules(path) == {"tierstore.planner.planner", "tierstore.store.native"}


def imported_files(path: Path, files: dict[str, Path]) -> set[str]:
    """Modules of ``files``, by name, that a file imports. Imports for type checking count."""
    found = set()
    for module, name in imports(path):
        of_top = module.replace("tierstore_bench", "bench")
        whole = f"{of_top}.{name}"
        found.add(whole if whole in files or whole == "tierstore._core" else of_top)
    return found & files.keys()


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += graph[module]
    return found


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The largest sets of modules of which each reaches each by imports."""
    reached = {module: reachable(graph, module) for module in graph}
    return {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"e"}, "f": {"a"}}
    assert circles(graph) == {frozenset("abc"), frozenset("e")}


def test_files_import_in_no_circle() -> None:
    assert not circles({module: imported_files(path, FILES) for module, path in FILES.items()})


def test_tests_import_in_no_circle() -> None:
    files = {module_name(path): path for path in (ROOT / "tests").rglob("*.py")}
    assert not circles({module: imported_files(path, files) for module, path in files.items()})


def test_constructors_take_few_parameters() -> None:
    """A constructor of our own takes six at most; more are a dataclass of their own."""
    names, found = set(), set()
    for node in (node for path in FILES.values() for node in syntax(path)):
        if not isinstance(node, ast.ClassDef):
            continue
        names.add(node.name)
        for function in node.body:
            if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                parts = function.args
                count = len([*parts.posonlyargs, *parts.args, *parts.kwonlyargs]) - 1
                if count + bool(parts.vararg) + bool(parts.kwarg) > MAX_PARAMETERS:
                    found.add(node.name)
    assert not found - LIKE_TORCH, "take a dataclass"
    assert not LIKE_TORCH - names, "what follows torch exists"


def signatures(path: Path) -> Iterator[ast.expr]:
    """Annotations of parameters and returns, and of fields of classes, ``self.x: T`` included."""
    for node in syntax(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = node.args
            given = [*parts.posonlyargs, *parts.args, *parts.kwonlyargs, parts.vararg, parts.kwarg]
            found = [argument.annotation for argument in given if argument is not None] + [node.returns]
            yield from (annotation for annotation in found if annotation is not None)
        elif isinstance(node, ast.ClassDef):
            yield from (field.annotation for field in node.body if isinstance(field, ast.AnnAssign))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            yield node.annotation


def count_any(annotation: ast.expr) -> int:
    """How often ``Any`` is in it, ``typing.Any`` and annotations in quotes included."""
    names = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)]
    names += [node.attr for node in ast.walk(annotation) if isinstance(node, ast.Attribute)]
    texts = [node.value for node in ast.walk(annotation) if isinstance(node, ast.Constant)]
    return names.count("Any") + sum(
        len(re.findall(r"\bAny\b", text)) for text in texts if isinstance(text, str)
    )


def test_any_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "typed.py"
    path.write_text(
        "class Typed:\n"
        "    field: dict[str, Any]\n"
        "    def method(self, first: typing.Any, *rest: 'list[Any]', other: int, **more: Any) -> Any:\n"
        "        self.own: Any = None\n"
        "        inner: Any = first\n"
    )
    assert sum(map(count_any, signatures(path))) == 6


def test_signatures_say_their_types() -> None:
    paths = [path for path in FILES.values() if layer_of(module_name(path)) in TYPED]
    counts = {path: sum(map(count_any, signatures(path))) for path in paths}
    assert paths
    assert sum(counts.values()) <= MAX_ANY, "say the type: of tierstore._core, a protocol, or object"


def core_files() -> list[Path]:
    files = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".cc", ".h", ".cu", ".cuh"}]
    return sorted(p for p in files if "tests" not in p.relative_to(ROOT).parts)


@pytest.mark.parametrize("path", core_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_core_includes_point_down(path: Path) -> None:
    folder = path.relative_to(ROOT / "csrc").parts[0]
    text = path.read_text(encoding="utf-8")
    includes = re.findall(r'^#include "(\w+)/', text, flags=re.MULTILINE)
    assert set(includes) <= CORE_INCLUDES[folder] | {folder}
    assert not re.search(r"#include <(torch|ATen|c10)/", text), "the core knows no torch"


def test_benchmarks_patch_nothing() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "bench").rglob("*.py")]
    assert not [text for text in texts if re.search(r"\b(setattr|patch)\(", text)]


def test_the_design_names_every_layer() -> None:
    table = (ROOT / "docs/design.md").read_text(encoding="utf-8").split("```")[1]
    assert not [name for name in PROJECT_IMPORTS if not re.search(rf"\b{name}\b", table)]
