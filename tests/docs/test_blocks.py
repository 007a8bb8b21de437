"""Every command and code block of the documents runs."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.generate.commands import parsers
from tests import warm
from tests.docs.page_checks import CHECKS
from tests.docs.pages import FILE_LANGUAGES, ROOT, RUN_LANGUAGES, Block, blocks_of, pages, sentences_of
from tierstore.cli.bench import find_benchmark
from tierstore.cli.main import build_parser

PAGES = [page for page in pages() if any(block.language != "text" for block in blocks_of(page))]
COMMANDS = ("tierstore", "python", "make", "pip", "torchrun", "sed")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in {"text", *FILE_LANGUAGES, *RUN_LANGUAGES}, f"{block}: {block.language!r}"
        if block.language not in {"text", *RUN_LANGUAGES}:
            assert "file" in block.notes, f"{block} is neither run nor a file of one that is"
        if block.language == "text":
            starts = [line.split(" ")[0] for line in block.commands()]
            assert not set(starts) & set(COMMANDS), f"{block} has commands, so it is bash"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_printed_command_is_understood(page: Path) -> None:
    for block in blocks_of(page):
        for command in block.commands() if block.language == "bash" else []:
            words = [w for w in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", w)]
            if words[0] == "tierstore":
                understood(words[1:], block)
            elif "test instead" not in block.notes:
                assert words[0] in COMMANDS, (
                    f"{block}: {words[0]} is not run; say what is to be tested instead"
                )


def understood(words: list[str], block: Block) -> None:
    """Parse a command of ours by its own parser."""
    parser = build_parser()
    if words[:1] == ["bench"] and len(words) > 1:
        benchmark = find_benchmark(words[1])
        parser, words = argparse.ArgumentParser(), words[2:]
        benchmark.add_arguments(parser)
    try:
        parser.parse_args(words)
    except SystemExit as end:  # --help ends with 0
        if end.code:
            pytest.fail(f"{block}: {' '.join(words)}")


def test_commands_in_sentences_are_there() -> None:
    """A sentence may leave out arguments, and say FILE for one, but makes up no command, option or target."""
    options = {parser.prog: parser.format_help() for parser in parsers()}
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    wrong = []
    for page in pages():
        for span in re.findall(r"`((?:tierstore|make) [^`]+)`", sentences_of(page)):
            words = span.replace("[", "").replace("]", "").split()
            if words[0] == "make":
                there = {word for word in words[1:] if "=" not in word} <= {*targets}
            else:
                flags = [word for word in words if word.startswith("--")]
                group = "".join(text for prog, text in options.items() if words[:2] == prog.split()[:2])
                text = options.get(" ".join(words[:3]), group)
                there = bool(text) and all(f"{flag} " in text for flag in flags)
            if not there:
                wrong.append(f"{name_of(page)}: {span}")
    assert not wrong


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks_of(page):
        if "file" in block.notes:
            (tmp_path / block.notes["file"]).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            # Lines of the page, for tracebacks.
            exec(compile("\n" * block.line + block.to_run(), str(page), "exec"), names)
        elif block.language == "bash":
            run_in_a_shell(block)
    CHECKS.get(name_of(page), lambda names: None)(names)


def run_in_a_shell(block: Block) -> None:
    path = os.pathsep.join([str(warm.folder()), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.to_run()],
        env={**os.environ, "PATH": path, "ROOT": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{block}: exit code {done.returncode}\n{done.stdout}"
