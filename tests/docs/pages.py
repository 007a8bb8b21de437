"""Fenced blocks of the documents, and how each of them is run.

A block is run as it stands, unless an HTML comment right above its fence says otherwise:

- ``<!-- file: NAME -->``: the block is written to the file NAME, which a later block uses;
- ``<!-- test with: OLD -> NEW; OLD -> NEW -->``: each OLD, which must be there, is replaced by a NEW;
- ``<!-- test instead: COMMAND -->``: COMMAND is run, where the block would install or fetch something.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN_LANGUAGES = {"python", "bash"}
FILE_LANGUAGES = {"python", "yaml", "json"}

_FENCE = re.compile(r"^( *)(```+)(\S*)\s*$")
_COMMENT = re.compile(r"<!-- (file|test with|test instead): (.*?) -->\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    notes: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def to_run(self) -> str:
        """Return the text that a test runs in place of the block."""
        if "test instead" in self.notes:
            return self.notes["test instead"]
        text = self.text
        for pair in filter(None, self.notes.get("test with", "").split("; ")):
            old, new = (part.strip() for part in pair.split(" -> "))
            assert old in text, f"{self}: {old!r} is not in the block"
            text = text.replace(old, new)
        return text

    def commands(self) -> list[str]:
        """Return the commands of a bash block as printed, continued lines joined."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def pages() -> list[Path]:
    """Return every document that a user reads; pages that the build generates are not among them."""
    names = (ROOT / "docs/.gitignore").read_text(encoding="utf-8").split()
    generated = {ROOT / "docs" / name for name in names}
    below = [page for top in ("docs", "examples", "bench") for page in (ROOT / top).rglob("*.md")]
    return sorted({*ROOT.glob("*.md"), *below} - generated)


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in their order, directives of the site's generator left out."""
    found: list[Block] = []
    before: list[str] = []
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), start=1))
    for number, line in lines:
        opening = _FENCE.match(line)
        if opening is None:
            before.append(line)
            continue
        indent, fence, language = opening.groups()
        body = []
        for _, inner in lines:
            if inner.strip() == fence:
                break
            body.append(inner.removeprefix(indent))
        comment = _COMMENT.search("\n".join(before))
        notes = {comment[1]: " ".join(comment[2].split())} if comment else {}
        if not language.startswith("{"):
            found.append(Block(page, number, language, "\n".join(body) + "\n", notes))
        before = []
    return found


def sentences_of(page: Path) -> str:
    """Return the page without its fenced blocks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
