"""Pages keep promises: docs/design.md has the contracts of the code, README.md begins with the hardware."""

from __future__ import annotations

import inspect
import re

import cache_policies
from tests.docs.pages import ROOT, blocks_of
from tierstore.store.protocol import RowStore

BLOCKS = [block.text for block in blocks_of(ROOT / "docs/design.md")]


def test_methods_of_a_row_store() -> None:
    (text,) = [text for text in BLOCKS if text.startswith("class RowStore(Protocol)")]
    printed = dict(re.findall(r"^    def (\w+)\(self(.*?)\)", text, flags=re.MULTILINE))
    printed = {
        name: [p.split("=")[0] for p in re.findall(r"[\w=\"]+", rest)] for name, rest in printed.items()
    }
    methods = {name: value for name, value in vars(RowStore).items() if inspect.isfunction(value)}
    public = {name: value for name, value in methods.items() if name[0] != "_"}
    assert printed == {name: [*inspect.signature(method).parameters][1:] for name, method in public.items()}


def test_hooks_of_a_policy() -> None:
    (text,) = [text for text in BLOCKS if "(void* state," in text]
    printed = re.findall(r"^\w+ +(\w+) *\(void\* state,", text, flags=re.MULTILINE)
    assert printed == [*cache_policies.Policy.hook_names(), "admit"]


def test_the_first_ten_lines_say_which_hardware_runs_what() -> None:
    first = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:10]
    rows = [line for line in first if line.startswith("|")]
    assert rows[0] == "| hardware | today |"
    assert [row.split(" ")[1] for row in rows[2:]] == ["CPU", "GPU"]
