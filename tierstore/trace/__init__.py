"""Traces of embedding lookups: recording them, reading them from many kinds of files, describing them."""

from tierstore.trace.describe import Description, describe
from tierstore.trace.recorded import TraceRecorder
from tierstore.trace.source import from_dataset, open_trace
from tierstore.trace.trace import Trace

__all__ = ["Description", "Trace", "TraceRecorder", "describe", "from_dataset", "open_trace"]
