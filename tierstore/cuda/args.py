"""The arguments of the kernels: the structs of csrc/cuda/args.h, whose sizes a test compares."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_uint32, c_void_p


def _struct(name: str, *fields: tuple[str, type]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, c_void_p) for name in names]


RowsArgs = _struct(
    "RowsArgs",
    *_pointers("weights"),
    ("weight_floats", c_int64),
    *_pointers("state"),
    ("state_floats", c_int64),
)
MovedRows = _struct(
    "MovedRows",
    *_pointers("head"),
    ("head_floats", c_int64),
    *_pointers("tail"),
    ("tail_floats", c_int64),
    *_pointers("slots"),
)
MoveRowsArgs = _struct(
    "MoveRowsArgs",
    *(("source", MovedRows), ("target", MovedRows)),
    *(("n", c_int64), ("words", c_int64), ("head_words", c_int64)),
)
GatherArgs = _struct("GatherArgs", ("rows", RowsArgs), *_pointers("slots", "inverse"))
BagsArgs = _struct(
    "BagsArgs",
    *_pointers("offsets"),
    ("num_bags", c_int64),
    *_pointers("bag_start"),
    ("num_features", c_int64),
    *_pointers("out_offset", "out_stride", "poolings"),
)
LookupPooledArgs = _struct(
    "LookupPooledArgs",
    ("gather", GatherArgs),
    ("bags", BagsArgs),
    *_pointers("weights", "out", "argmax"),
    ("are_short", c_int32),
    ("unused", c_int32),
)
LookupRowsArgs = _struct(
    "LookupRowsArgs", ("gather", GatherArgs), ("n", c_int64), *_pointers("out"), ("out_stride", c_int64)
)
WeightGradsArgs = _struct(
    "WeightGradsArgs", ("gather", GatherArgs), ("bags", BagsArgs), *_pointers("grad", "out")
)
BagShare = _struct(
    "BagShare", ("grad", c_int64), ("argmax", c_int64), ("scale", c_float), ("unused", c_int32)
)
BagSharesArgs = _struct(
    "BagSharesArgs", ("bags", BagsArgs), ("dim", c_int64), *_pointers("inverse", "shares", "bag_of")
)
GradsArgs = _struct(
    "GradsArgs",
    *_pointers("grad"),
    ("stride", c_int64),
    *_pointers("shares", "bag_of", "weights", "argmax"),
)
WEIGHTS = {"fp32": 0, "bf16": 1, "fp16": 2}
"""Types of weights by dtype: csrc/cuda/weights.cuh, WeightType."""
STEP_FIELDS = (
    *("lr", "eps", "l2", "keep", "decay", "beta1", "beta2", "rest1", "rest2"),
    *("adam_lr", "adam_inv_sqrt_v", "clip_value", "clip_norm"),
)
MISSED_FIELDS = ("decays_all", "number", "keep_missed")
StepArgs = _struct(
    "StepArgs",
    *[(name, c_float) for name in STEP_FIELDS],
    *zip(MISSED_FIELDS, (c_int32, c_int64, c_double), strict=True),
)
RoundingArgs = _struct("RoundingArgs", *_pointers("keys", "seeds", "columns"))
UpdateArgs = _struct(
    "UpdateArgs",
    ("rows", RowsArgs),
    *_pointers("slots"),
    ("num_slots", c_int64),
    *_pointers("csr_start", "csr_positions"),
    ("grads", GradsArgs),
    ("step", StepArgs),
    ("rounding", RoundingArgs),
    ("check_finite", c_int32),
    ("num_long", c_int32),
    *_pointers("rejected", "squares", "means", "hot", "hot_piece"),
    ("num_hot", c_int64),
    *_pointers("partials"),
)
InitRowsArgs = _struct(
    "InitRowsArgs",
    ("rows", RowsArgs),
    *_pointers("slots", "keys"),
    ("n", c_int64),
    ("dim", c_int64),
    ("state_floats", c_int64),
    ("behind", c_int64),
    ("state_value", c_float),
    ("weights", c_int32),
    *_pointers("kinds", "first", "second", "seeds", "columns"),
)
SortArgs = _struct(
    "SortArgs",
    *_pointers("keys", "positions", "sorted_keys", "sorted_positions", "counts"),
    ("stride", c_int64),
    *_pointers("totals"),
    *(("n", c_int64), ("shift", c_int32), ("bits", c_int32)),
)
SumsArgs = _struct(
    "SumsArgs",
    *_pointers("rows"),
    *(("num_rows", c_int64), ("columns", c_int64), ("stride", c_int64)),
    *_pointers("totals"),
)
BatchArgs = _struct(
    "BatchArgs",
    *_pointers("keys", "sorted_keys", "sorted_positions"),
    *(("n", c_int64), ("skipped", c_uint32), ("num_tables", c_int32)),
    *_pointers("bases", "tables", "first_runs", "last_runs", "firsts", "sums"),
    ("stride", c_int64),
    *_pointers("totals", "unique", "inverse", "csr_start", "csr_positions"),
)
STRUCTS = (
    *(MoveRowsArgs, LookupPooledArgs, LookupRowsArgs, WeightGradsArgs),
    *(BagSharesArgs, BagShare, UpdateArgs, InitRowsArgs, SortArgs, SumsArgs, BatchArgs),
)
