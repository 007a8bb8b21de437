"""Tensors of our own have the device and the dtype that we say, whatever torch's defaults are.

Users let their GPU, or bfloat16, be the default.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

PACKAGE = Path(__file__).parent.parent / "tierstore"
FACTORIES = {factory.__name__ for factory in _device_constructors()}
FLOATS = {"empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros"}
"""Factories of tensors that are of the default dtype unless another one is given."""


def by_default(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each call of ``torch`` that makes a tensor on the default device, or of
    the default dtype."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name), keywords=keywords):
                given = {keyword.arg for keyword in keywords}
                if (name in FACTORIES and "device" not in given) or (name in FLOATS and "dtype" not in given):
                    yield node.lineno, ast.unparse(node)


def test_every_tensor_has_a_device_and_a_dtype():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    found = [f"{file}:{line}: {call}" for file in files for line, call in by_default(file.read_text())]
    assert found == []


def test_what_is_found():
    lines = [
        "torch.zeros(2, device='cpu')",
        "torch.ones(2, dtype=int, device='cpu')",
        "x.new_zeros(2)",
        "f(torch.as_tensor(x, dtype=int))",
        "torch.arange(2, device='cpu')",
    ]
    assert [line for line, _ in by_default("\n".join(lines))] == [1, 4]
