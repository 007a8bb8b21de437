"""Links between documents lead somewhere, pages are named rightly in the code, and no line is too long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, pages, sentences_of

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
MENTION = re.compile(r"\b(?:docs|bench/results)/[\w/-]+\.(?:md|json)\b")
GENERATED = {ROOT / "docs/reference/commands.md", ROOT / "docs/reference/measurements.md"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """Return the page without its fenced blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "`code`", sentences_of(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target in GENERATED:  # the test of the site checks the anchors of pages that the build makes
            continue
        assert target.exists(), f"{name_of(page)}: {link}"
        assert not anchor or anchor in anchors(target), (
            f"{name_of(page)}: {link}; there are {anchors(target)}"
        )


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_lines_are_of_at_most_120_characters(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [f"{name_of(page)}:{i}" for i, line in enumerate(lines, start=1) if len(line) > 120]


def test_pages_that_the_code_names_exist() -> None:
    tops = ("tierstore", "bench", "cache_policies", "csrc", "tests", "examples")
    files = [path for top in tops for path in (ROOT / top).rglob("*") if path.suffix in {".py", ".h", ".cc"}]
    wrong = [
        f"{name_of(path)}: {name}"
        for path in files
        for name in MENTION.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / name).exists() and ROOT / name not in GENERATED
    ]
    assert not wrong
