"""Parts of ``tierstore bench gpu`` that train: one system each, its tables alone and under two models."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tierstore
from tierstore.data import Batch, load
from tierstore.models import DLRM, DCNv2
from tierstore.sparse import KeyedJaggedTensor

from ._gpu_rows import copies
from ._gpu_sizes import RATIO, Figures, Setting
from ._gpu_systems import LR, SYSTEMS, Absent, Tables

DEPTH, WINDOW = 2, 16
_HOST_STAGES = ("announce", "plan", "move", "stall", "compute")
_WARM_SECONDS, _SECONDS = 4.0, 3.0
_SHARES = {"embedding": (4, 2), "dlrm": (1, 2), "dcnv2": (1, 2)}
"""Of twelve batches, how many each stage warms up on, and how many are measured."""
_BAGS, _MOST_IDS = 256, 1 << 18
"""Of a lookup of rows that nobody has used."""


# -- batches: made once, and read by every part that trains ----------------------------------------


def make_batches(setting: Setting) -> Figures:
    """Make the batches of all trainings; those that are there when time is over are trained on."""
    sizes = setting.sizes
    dataset = load("synthetic:criteo", max_rows=sizes.max_rows)
    for number, batch in enumerate(islice(dataset.train(sizes.batch_size), sizes.batches)):
        part = setting.folder / f"{number:04d}.part"
        torch.save([batch.dense, batch.labels, batch.sparse.values(), batch.sparse.lengths()], part)
        os.replace(part, part.with_suffix(".batch"))
        yield {"batches": number + 1}


def read_batches(setting: Setting, most: int | None = None) -> list[Batch]:
    """Return the batches in their order, in locked memory where they go to a GPU."""
    names = [table.name for table in load("synthetic:criteo", max_rows=setting.sizes.max_rows).tables]
    found = [_read(path, names) for path in sorted(setting.folder.glob("*.batch"))[:most]]
    on_gpu = torch.device(setting.device).type == "cuda"
    return [batch.pin_memory() for batch in found] if on_gpu else found


def _read(path: Path, names: list[str]) -> Batch:
    dense, labels, values, lengths = torch.load(path)
    return Batch(dense, KeyedJaggedTensor(names, values, lengths=lengths), labels)


# -- stages ----------------------------------------------------------------------------------------


@dataclass
class Stage:
    """What is trained on one system's tables: ``step`` makes one step on a batch."""

    name: str
    step: Callable[[Batch], None]


def stages(tables: Tables, setting: Setting) -> Iterator[Stage]:
    """Yield the tables alone, then DLRM and DCN v2 on them, with layers as wide as MLPerf's, which multiply
    in TF32: in float32 they would take so long that it would not matter what tables take."""
    torch.set_float32_matmul_precision("high")
    sizes = setting.sizes
    lower = [sizes.width // 2, sizes.width // 4, sizes.dim]
    upper = [sizes.width, sizes.width, sizes.width // 2, sizes.width // 4, 1]
    gradients: list[Tensor] = []

    def alone(batch: Batch) -> None:
        values = tables.bags(batch.sparse.to(torch.device(tables.ids_on), non_blocking=True)).values()
        if not gradients:
            gradients.append(torch.ones_like(values))
        values.backward(gradients[0])

    yield Stage("embedding", _stepping(alone, tables.optimizers))
    dlrm = DLRM(tables.bags, 13, lower, upper)
    yield Stage("dlrm", _model_step(dlrm, tables, setting.device))
    dcn = DCNv2(tables.bags, 13, lower, upper, dcn_num_layers=3, dcn_low_rank_dim=sizes.width // 2)
    yield Stage("dcnv2", _model_step(dcn, tables, setting.device))


def _stepping(forward: Callable[[Batch], None], optimizers: Sequence[Any]) -> Callable[[Batch], None]:
    def step(batch: Batch) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        forward(batch)
        for optimizer in optimizers:
            optimizer.step()

    return step


def _model_step(model: Any, tables: Tables, device: str) -> Callable[[Batch], None]:
    for layers in (model.dense_arch, model.inter_arch, model.over_arch):
        layers.to(device)
    rows = {id(parameter) for parameter in tables.bags.parameters()}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in rows]
    optimizers = [torch.optim.Adagrad(dense, lr=LR), *tables.optimizers]

    def forward(batch: Batch) -> None:
        sparse = batch.sparse.to(torch.device(tables.ids_on), non_blocking=True)
        logits = model(batch.dense.to(device, non_blocking=True), sparse).squeeze(1)
        labels = batch.labels.to(device, non_blocking=True)
        nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()

    return _stepping(forward, optimizers)


def ahead_of(batches: Sequence[Batch], tables: Tables) -> Any:
    """Return the batches, with their rows on the way where the system fetches them ahead."""
    if not tables.ahead:
        return batches
    calls = {tables.bags: lambda batch: (batch.sparse,)}
    return tierstore.prefetch(batches, tables.bags, depth=DEPTH, window=WINDOW, inputs=calls)


def timed(
    stage: Stage,
    batches: Any,
    warm: int,
    finish: Callable[[], None],
    counted: Callable[[], dict[str, float]] = dict,
    most: int | None = None,
) -> dict[str, Any]:
    """Return milliseconds of a step after ``warm`` ones, and how many steps were measured.

    A slow system takes fewer steps: it warms up for ``_WARM_SECONDS`` and is measured for ``_SECONDS``.
    ``counted``: returns counters, of which the figures of a step are added. ``most``: steps that are
    measured at most; None: all.
    """
    begin, started, steps = time.perf_counter(), 0.0, 0
    before: dict[str, float] = {}
    for number, batch in enumerate(batches):
        now = time.perf_counter()
        if not started and number and (number >= warm or now - begin > _WARM_SECONDS):
            finish()
            before, started = counted(), time.perf_counter()
        elif started and (now - started > _SECONDS or steps == most):
            break
        stage.step(batch)
        steps += bool(started)
    finish()
    took, after = time.perf_counter() - started, counted()
    if hasattr(batches, "close"):
        batches.close()  # rows of batches that were not trained on
    if not steps:
        return {f"{stage.name}.ms_per_step": None, f"{stage.name}.steps": 0}
    return {
        f"{stage.name}.ms_per_step": 1e3 * took / steps,
        f"{stage.name}.steps": steps,
        **{f"{stage.name}.{name}": (after[name] - before[name]) / steps for name in before},
    }


def counters(tables: Tables) -> dict[str, float]:
    """Return what tierstore's tables have counted so far: milliseconds of the host's stages, in all threads,
    and rows that were not in ``hbm`` and that have left it."""
    if not tables.ahead:
        return {}
    stats = tables.bags.stats()
    hbm = stats["tiers"]["hbm"]
    return {
        **{f"host.{name}_ms": 1e3 * stats[f"{name}_seconds"] for name in _HOST_STAGES},
        "missed_rows": hbm["rows"] - hbm["row_hits"],
        "evicted_rows": stats["evicted_rows"],
    }


# -- parts -----------------------------------------------------------------------------------------


def touch_every_row(bags: Any) -> int:
    """Use every row once and update it with gradients of 0, so that no step that is measured has new rows:
    these are cheap, since no tier has them. Return the rows."""
    configs = bags.embedding_bag_configs()
    names = [name for config in configs for name in config.feature_names]
    rows = sum(config.num_embeddings for config in configs)
    most = max(1, min(_MOST_IDS, rows // (4 * RATIO)))  # which fit the smallest hbm
    for table, config in enumerate(configs):
        for first in range(0, config.num_embeddings, most):
            ids = torch.arange(first, min(first + most, config.num_embeddings))
            lengths = torch.zeros(len(names), _BAGS, dtype=torch.int64)
            lengths[table] = len(ids) // _BAGS
            lengths[table, : len(ids) % _BAGS] += 1
            values = bags(KeyedJaggedTensor(names, ids, lengths=lengths.view(-1))).values()
            values.backward(torch.zeros_like(values))
    return rows


def _wait() -> None:
    """Wait for the current stream. The whole GPU has work of later batches, too, which other threads give it
    meanwhile."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    event.synchronize()


def train(name: str, setting: Setting) -> Figures:
    """Train on the tables of one system."""
    try:
        tables = SYSTEMS[name](setting)
    except Absent as why:
        yield {"absent": str(why)}
        return
    batches = read_batches(setting)
    if not batches:
        raise RuntimeError("there are no batches: the part 'batches' has failed")
    on_gpu = torch.device(setting.device).type == "cuda"
    finish: Callable[[], None] = _wait if on_gpu else lambda: None
    yield {"batches": len(batches), "distinct_rows": _distinct(batches[-1])}
    # Lookups are made so many batches ahead. Without batches behind those that are measured, the lookups of
    # these would all be made before.
    ahead = min(DEPTH + WINDOW + 1, len(batches) // 2)
    count = len(batches) - ahead
    with closing(tables):
        if tables.ahead:
            begin = time.perf_counter()
            yield {"touched_rows": touch_every_row(tables.bags)}
            finish()
            yield {"touch_seconds": time.perf_counter() - begin}
        for stage in stages(tables, setting):
            warm, steps = (max(1, count * share // 12) for share in _SHARES[stage.name])
            own, batches = batches[: warm + steps + ahead], batches[warm + steps :]
            yield timed(stage, ahead_of(own, tables), warm, finish, partial(counters, tables), steps)


def bound(setting: Setting) -> Figures:
    """Say how long the tables alone take at least, by the bytes of a step and the card's copy bandwidth.

    These are: a vector for every bag, its gradient, and every distinct row read once, then read and written
    with its state.
    """
    sizes = setting.sizes
    ceiling = copies(sizes)
    batch = read_batches(setting, 1)[0]
    vector, distinct = 4 * sizes.dim, _distinct(batch)
    moved = 2 * batch.sparse.values().numel() * vector + distinct * (vector + 2 * sizes.row_bytes)
    yield {**ceiling, "bound.bytes": moved, "bound.ms": moved / ceiling["copy_gb_per_s"] / 1e6}


def train_in_hbm(setting: Setting) -> Figures:
    """Train with all rows in ``hbm``, and say how long that takes at least."""
    yield from bound(setting)
    yield from train("hbm", setting)


def _distinct(batch: Batch) -> int:
    return sum(len(torch.unique(batch.sparse[name].values())) for name in batch.sparse.keys())  # noqa: SIM118
