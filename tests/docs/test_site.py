"""The site builds without a warning, and every link within it leads to a page and an anchor."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import tierstore
from tests.docs.pages import ROOT
from tierstore.cli.main import main

RESULT_FIELDS = {"subject", "title", "command", "date", "commit", "machine", "conditions", "notes"}


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "docs", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.timeout(600)
def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 25
    broken = []
    for path, page in pages.items():
        for link in page.links:
            target, anchor = urldefrag(link.partition("?")[0] if "#" not in link else link)
            if ":" in target.split("/")[0]:  # https:, mailto:, data:
                continue
            file = (path.parent / unquote(target)).resolve() if target else path
            if not file.exists() or (file in pages and anchor not in pages[file].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


def test_every_public_name_is_on_the_page_of_names(site: Path) -> None:
    anchors = Page(site / "reference/api.html").anchors | Page(site / "reference/config.html").anchors
    names = {anchor.rpartition(".")[2] for anchor in anchors}
    assert not set(tierstore.__all__) - names - {"__version__"}


def test_every_command_is_on_the_page_of_commands(site: Path) -> None:
    anchors = Page(site / "reference/commands.html").anchors
    for command in ("train", "inspect", "plan", "trace-record", "verify", "bench-store"):
        assert f"tierstore-{command}" in anchors


@pytest.mark.parametrize("path", sorted((ROOT / "bench/results").glob("*.json")), ids=lambda path: path.stem)
def test_results_say_how_they_came_about(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result.keys() >= RESULT_FIELDS
    assert result["command"]
    assert result["commit"]
    assert path.name.startswith(result["date"])
    if "columns" in result:
        assert {len(row) for row in result["rows"]} == {len(result["columns"])}
    else:
        assert result["figures"]


def test_recorded_figures_get_machine_date_and_commit(tmp_path: Path) -> None:
    figures = tmp_path / "Some figures.json"
    figures.write_text('{"reads": {"rows_per_s": 5.0}}')
    command = ["bench", "record", str(figures), "--command", "tierstore bench store", "--to", str(tmp_path)]
    assert main(command) == 0
    (filed,) = tmp_path.glob("20*-some-figures.json")
    result = json.loads(filed.read_text())
    assert result.keys() >= {*RESULT_FIELDS, "figures"}
    assert result["figures"] == {"reads": {"rows_per_s": 5.0}}
    assert result["machine"]["cores"] >= 1
    assert main(command) == 2  # no result is replaced
