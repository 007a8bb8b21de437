"""Sphinx configuration of the documents: ``make docs``."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from generate import commands, measurements  # noqa: E402

import tierstore  # noqa: E402

project = "tierstore"
author = "the tierstore authors"
copyright = author
version = release = tierstore.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"tierstore {version}"
exclude_patterns = ["generate"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"


def write_pages(app: object) -> None:
    """Write the pages that are made from parsers and result files, unless they are as they should be."""
    for name, text in (("commands", commands.page()), ("measurements", measurements.page())):
        path = HERE / f"reference/{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: object) -> None:
    app.connect("builder-inited", write_pages)  # type: ignore[attr-defined]
