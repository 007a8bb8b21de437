"""``_core.pyi`` is what the built core has: every name, parameter, default and type."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import tierstore
from tierstore import _core

MOST_ARGUMENTS = 8
MOST_BY_POSITION = 4  # of a constructor's
STUB = ast.parse((Path(tierstore.__file__).parent / "_core.pyi").read_text())
Signature = dict[str, tuple[str, str, str]]
"""Kind, annotation and default of each parameter by name; "return" has the annotation of what is returned."""

ALIASES = {
    node.target.id: ast.unparse(node.value)
    for node in STUB.body
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
}
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}
TYPES_OF_STUB_ALONE = {"StoreCounters"}
OWN_METHODS = {"__init__", "__len__"}


def public(names: object) -> set[str]:
    return {name for name in names if not name.startswith("_") or name in OWN_METHODS}  # type: ignore[attr-defined]


def parameters(function: ast.FunctionDef) -> Signature:
    args = function.args
    found: Signature = {"return": ("", ast.unparse(function.returns) if function.returns else "", "")}
    defaults = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)
    for kind, names, values in (
        ("positional", args.args, defaults),
        ("keyword", args.kwonlyargs, args.kw_defaults),
    ):
        for arg, value in zip(names, values, strict=True):
            if arg.arg != "self":
                default = "" if value is None else ast.unparse(value)
                found[arg.arg] = (kind, ast.unparse(arg.annotation) if arg.annotation else "", default)
    return found


def of_core(doc: str, name: str) -> Signature:
    """Return the signature in the first line of a docstring, which lacks the name of a property."""
    line = doc.splitlines()[0]
    text = line if line.startswith(name) else f"{name}{line}"
    (function,) = ast.parse(f"def {text}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return parameters(function)


def plain(annotation: str) -> str:
    """Return the type as both sides write it: without aliases and modules, "int" for what converts to it."""
    for alias, meaning in ALIASES.items():
        annotation = re.sub(rf"(?<![\w.]){alias}\b", meaning, annotation)
    annotation = re.sub(
        r"typing\.Annotated\[numpy\.typing\.ArrayLike, (numpy\.\w+)\]", r"NDArray[\1]", annotation
    )
    annotation = re.sub(
        r"typing\.Supports(Int|Float) \| typing\.SupportsIndex", lambda m: m[1].lower(), annotation
    )
    annotation = re.sub(
        r"\b(tierstore\._core|collections\.abc|numpy\.typing|numpy|np|builtins)\.", "", annotation
    )
    return annotation.replace("bool_", "bool")


def same_type(stub: str, core: str) -> bool:
    """Return whether the stub says what the core says, or more where pybind11 knows the container alone."""
    stub, core = (plain(text).removesuffix(" | None") for text in (stub, core))
    if core in ("object", "list", "tuple", "dict", "ndarray"):
        return core in ("object", "ndarray") or stub.startswith(f"{core}[") or stub == "StoreCounters"
    return stub == core or (core == "str" and stub == "str | bytes")


def differences(where: str, stub: Signature, core: Signature) -> list[str]:
    if list(stub) != list(core):
        return [f"{where}: the stub has {list(stub)}, the core {list(core)}"]
    found = []
    for name, (kind, annotation, default) in stub.items():
        core_kind, core_annotation, core_default = core[name]
        if kind != core_kind or (default != "..." and default != core_default):
            found.append(f"{where}({name}): {kind} {default!r}, in the core {core_kind} {core_default!r}")
        if not same_type(annotation, core_annotation):
            found.append(f"{where}({name}): {plain(annotation)}, in the core {plain(core_annotation)}")
    return found


def test_names() -> None:
    there = public(vars(_core))
    assert there == (public(CLASSES) - TYPES_OF_STUB_ALONE) | public(FUNCTIONS)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_functions(name: str) -> None:
    stub = parameters(FUNCTIONS[name])
    assert differences(name, stub, of_core(getattr(_core, name).__doc__, name)) == []


@pytest.mark.parametrize("name", sorted(public(CLASSES) - TYPES_OF_STUB_ALONE))
def test_classes(name: str) -> None:
    stub, core = CLASSES[name], getattr(_core, name)
    assert [ast.unparse(base) for base in stub.bases] == [
        base.__name__ for base in core.__bases__ if base.__name__ != "pybind11_object"
    ]
    methods = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    constants = {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    cannot_be_made = "Initialize self" in (vars(core).get("__init__", int).__doc__ or "Initialize self")
    here = public(vars(core)) - ({"__init__"} if cannot_be_made else set())
    assert here == set(methods) | constants
    for method, node in methods.items():
        value = vars(core)[method]
        if is_property := isinstance(value, property):
            value = value.fget
        assert is_property == any(ast.unparse(d) == "property" for d in node.decorator_list), method
        assert (not node.decorator_list) or is_property or isinstance(value, staticmethod)
        doc = getattr(core, method).__doc__ if isinstance(value, staticmethod) else value.__doc__
        signature = of_core(doc, method)
        if is_property:
            signature = {"return": signature["return"]}
        assert differences(f"{name}.{method}", parameters(node), signature) == []
    for constant in constants:
        assert isinstance(getattr(core, constant), float)


def test_no_call_takes_more_than_eight_arguments() -> None:
    calls = {name: node for name, node in FUNCTIONS.items()}
    for name, node in CLASSES.items():
        calls |= {f"{name}.{m.name}": m for m in node.body if isinstance(m, ast.FunctionDef)}
    long = {name for name, node in calls.items() if len(parameters(node)) - 1 > MOST_ARGUMENTS}
    assert not long


def test_structs_are_filled_by_name() -> None:
    methods = [
        (name, m) for name, node in CLASSES.items() for m in node.body if isinstance(m, ast.FunctionDef)
    ]
    made = {name: [*parameters(m).values()][1:] for name, m in methods if m.name == "__init__"}
    long = {name: fields for name, fields in made.items() if len(fields) > MOST_BY_POSITION}
    assert {"Bags", "InitialValues", "OptimizerStep", "ShareConfig", "UpdateArgs"} <= long.keys()
    assert {kind for fields in long.values() for kind, _, _ in fields} == {"keyword"}


@pytest.mark.parametrize(
    ("stub", "core"),
    [
        ("def f(a: int) -> None: ...", "f(b: int) -> None"),
        ("def f(a: int) -> None: ...", "f(a: int, b: int) -> None"),
        ("def f(a: int = 1) -> None: ...", "f(a: int = 2) -> None"),
        ("def f(a: int) -> None: ...", "f(*, a: int) -> None"),
        ("def f(a: Int32Array) -> None: ...", "f(a: numpy.typing.NDArray[numpy.int64]) -> None"),
        ("def f(a: int) -> bool: ...", "f(a: int) -> int"),
        ("def f(a: int) -> int: ...", "f(a: int) -> tuple"),
    ],
)
def test_differences_are_found(stub: str, core: str) -> None:
    (function,) = ast.parse(stub).body
    assert isinstance(function, ast.FunctionDef)
    assert differences("f", parameters(function), of_core(core, "f"))
