"""Numbers and places of results that cannot be are refused by every command before it works."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tierstore.cli import arguments
from tierstore.cli.bench import benchmark_names, find_benchmark
from tierstore.cli.main import build_parser, main
from tierstore.errors import ConfigError
from tierstore.result_file import ResultFile


@cache
def parsers() -> list[tuple[list[str], argparse.ArgumentParser]]:
    """Each command with its words, and each benchmark."""
    found = list(_within([], build_parser()))
    for name in benchmark_names():
        parser = argparse.ArgumentParser()
        find_benchmark(name).add_arguments(parser)
        found.append((["bench", name], parser))
    return found


def _within(words: list[str], parser: argparse.ArgumentParser) -> Iterator[tuple[list[str], Any]]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below and words != ["bench"]:
        yield words, parser
    for action in below:
        for name, child in action.choices.items():
            yield from _within([*words, name], child)


def options(*names: str) -> list[Any]:
    return [
        pytest.param(words, action, id="_".join([*words, action.dest]))
        for words, parser in parsers()
        for action in parser._actions
        if action.option_strings
        and (action.type is Path and action.dest in names if names else _is_number(action))
    ]


def _is_number(action: argparse.Action) -> bool:
    """Whether the option's type makes a number of "1", and nothing of "x"."""
    if not callable(action.type):
        return False
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as scratch:  # some types make the folder that they are given
        os.chdir(scratch)
        try:
            one = action.type("1")
            action.type("x")
        except (ValueError, argparse.ArgumentTypeError, ConfigError):
            return isinstance(one, int | float)
        finally:
            os.chdir(here)
    return False


def run(words: list[str], action: argparse.Action, value: str) -> tuple[int, bool]:
    """Exit code, and whether argparse itself refused. What else is needed is not there, so that a command
    which begins to work fails in another way."""
    (parser,) = [parser for found, parser in parsers() if found == words]
    given = [action.option_strings[-1] + "=" + value]
    for other in parser._actions:
        if other.required and other is not action:
            given += [*other.option_strings[-1:], next(iter(other.choices or ["missing"]))]
    try:
        return main([*words, *given]), False
    except SystemExit as usage:
        return int(usage.code or 0), True


@pytest.mark.parametrize("bad", ["nan", "inf", "-1"])
@pytest.mark.parametrize(("words", "action"), options())
def test_numbers(words: list[str], action: Any, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    if action.dest == "seed" and bad == "-1":
        return
    option = action.option_strings[-1]
    code, usage = run(words, action, bad)
    said = capsys.readouterr().err
    assert code == 2
    assert f"argument {'/'.join(action.option_strings)}" in said if usage else f"error: {option} is " in said


def test_every_argument_says_what_it_is() -> None:
    """A help begins with a word for the thing: not with a default, nor with what the thing belongs to."""
    silent = {
        f"{' '.join(words)} {action.option_strings or action.metavar}"
        for words, parser in parsers()
        for action in parser._actions
        if re.match(r"(\(|of |or |for |default|$)", action.help or "")
    }
    assert not silent


def test_there_are_numbers_and_results_to_check() -> None:
    assert len(options()) > 60
    found = {param.id for param in options(*arguments.RESULTS)}
    assert {
        "bench_hit-rate_json",
        "bench_store_json",
        "plan_plot",
        "train_json",
        "train_save_curves",
    } <= found


@pytest.mark.parametrize(("words", "action"), options(*arguments.RESULTS))
def test_places_of_results(words: list[str], action: Any, capsys: pytest.CaptureFixture[str]) -> None:
    option = action.option_strings[-1]
    code, _ = run(words, action, "/proc/self/nowhere.json")  # where nobody, root included, can write
    said = capsys.readouterr().err
    assert code == 2
    assert f"error: {option} /proc/self/nowhere.json: " in said
    assert "give another path" in said


@pytest.mark.parametrize(("words", "parser"), [pytest.param(*p, id="_".join(p[0])) for p in parsers()])
def test_defaults_are_fit(words: list[str], parser: argparse.ArgumentParser) -> None:
    arguments.check_arguments(argparse.Namespace(**{a.dest: a.default for a in parser._actions}))


def test_checking_leaves_files_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    ResultFile(tmp_path / "old.json", "--json")
    ResultFile(tmp_path / "new.json", "--json")
    ResultFile(Path("/dev/stdout"), "--json")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "{}"
    with pytest.raises(ConfigError, match="File name too long"):
        ResultFile(tmp_path / ("x" * 253), "--json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", str(1 << 63)], f"--seed is {1 << 63}; it must fit 64 bits"),
        (["--store", "file"], "--store file is a file; give a folder"),
        (["--store", "file/rows"], "--store file/rows: file is a file; give another path"),
        (["--checkpoint", "file"], "--checkpoint file is a file; give a folder"),
        (["--threads", "100000"], "--threads is 100000; it must be at most 1024"),
        (["--record", "/dev/full"], "/dev/full is no regular file; give another path"),
        (["--record", "."], "--record . is a folder"),
    ],
)
def test_arguments_that_no_training_survives(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    data = ["--data", "synthetic:zipf:1", "--rows", "100", "--tables", "1", "--dim", "4", "--steps", "1"]
    assert main(["train", *data, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert os.listdir() == ["file"]


def test_seconds_that_are_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--tables", "t.yaml", "--topology", "t.yaml", "--search-seconds", "soon"])
    assert "argument --search-seconds: soon is no number of seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [["inspect", ".", "--at"], ["commits", ".", "--drop"], ["export", ".", "x", "--at"]],
    ids=" ".join,
)
@pytest.mark.parametrize("text", ["", "tag:", "number:best"])
def test_commits_that_cannot_be(command: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, text])
    assert f"a commit is a number, a tag, number:N or tag:NAME, not {text!r}" in capsys.readouterr().err
    assert main([*command, str(1 << 63)]) == 2
    assert "it must fit 64 bits" in capsys.readouterr().err
