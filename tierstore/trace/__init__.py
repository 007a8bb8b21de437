"""Traces of embedding lookups: records, reads (from many kinds of files) and describes them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstore.trace.description import Description, describe
    from tierstore.trace.export import TableCurve, planner_input, steady_curves, table_curves
    from tierstore.trace.recorded import TraceRecorder
    from tierstore.trace.source import from_dataset, open_trace
    from tierstore.trace.trace import Trace

# Imported at first use: commands that only parse their options must not wait for torch and numba.
_MODULES = {
    "Description": "description",
    "TableCurve": "export",
    "Trace": "trace",
    "TraceRecorder": "recorded",
    "describe": "description",
    "from_dataset": "source",
    "open_trace": "source",
    "planner_input": "export",
    "steady_curves": "export",
    "table_curves": "export",
}
__all__ = [
    "Description",
    "TableCurve",
    "Trace",
    "TraceRecorder",
    "describe",
    "from_dataset",
    "open_trace",
    "planner_input",
    "steady_curves",
    "table_curves",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
