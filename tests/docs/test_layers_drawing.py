"""The drawing of the layers in docs/design.md: every import goes to a lower line, and no layer is missing."""

from __future__ import annotations

import re

from tests.source_files import ROOT, layer_of, module_name, python_files
from tests.test_layers import PROJECT_IMPORTS, core_files, imported_modules


def lines_of(part: int) -> dict[str, int]:
    """Return the line of every layer in the drawing, 0 for Python's and 1 for the core's; the top is 0."""
    section = (ROOT / "docs/design.md").read_text(encoding="utf-8").split("## The layers as they are")[1]
    drawing = section.split("```")[1].removeprefix("text\n").split("\n\nC++ core:\n")[part]
    return {layer: i for i, line in enumerate(drawing.splitlines()) for layer in line.split()}


def test_imports_go_to_lower_lines_of_the_drawing() -> None:
    line = lines_of(0)
    assert line.keys() == PROJECT_IMPORTS.keys() - {
        "tierstore"
    }  # the package itself hands out everybody's names
    for path in python_files():
        layer = layer_of(module_name(path))
        imported = {layer_of(name) for name in imported_modules(path)} & line.keys()
        for other in imported - {layer} if layer in line else ():
            assert line[other] > line[layer], (
                f"{path.relative_to(ROOT)} imports {other}: draw {layer} above it"
            )


def test_includes_of_the_core_go_to_lower_lines_of_the_drawing() -> None:
    line = lines_of(1)
    for path in core_files():
        folder = path.relative_to(ROOT / "csrc").parts[0]
        for other in set(re.findall(r'^#include "(\w+)/', path.read_text(encoding="utf-8"), re.MULTILINE)) - {
            folder
        }:
            assert line[other] > line[folder], f"{path.relative_to(ROOT)} includes {other}"
