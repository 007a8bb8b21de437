"""Checks marked ``cuda`` run where a GPU is; elsewhere they are counted, in several processes, too."""

from __future__ import annotations

from typing import Any

import pytest

_wanted = pytest.StashKey[tuple[int, str]]()


def _missing() -> str:
    """Why no GPU can be used here; empty where one can."""
    from tierstore.cuda.driver import Driver
    from tierstore.errors import GpuError

    try:
        Driver().open_device(0)
    except GpuError as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    want = [item for item in items if item.get_closest_marker("cuda")]
    missing = _missing() if want else ""
    if missing:
        config.hook.pytest_deselected(items=want)
        items[:] = [item for item in items if item not in want]
        config.stash[_wanted] = len(want), missing
        getattr(config, "workeroutput", {})["wanted"] = len(want), missing


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each process has collected all checks."""
    if "wanted" in getattr(node, "workeroutput", {}):
        node.config.stash[_wanted] = node.workeroutput["wanted"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count, missing = config.stash.get(_wanted, (0, ""))
    if count:
        terminalreporter.write_line(f"{count} checks want a GPU and did not run: {missing}")
