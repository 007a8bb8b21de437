"""Measures the seconds per row and byte of this machine's CPU engine, which ``tierstore bench device``
writes.

Small tables are trained with prefetch, and their rows are moved through the tiers as in a step. The seconds
of each kind of move are fitted by non-negative least squares to the planner's terms (docs/planner.md). The
models that judge these figures (``bench/research/trained.py``) have other tables, sizes and skews.

Seconds are clock time without waits for other batches and for the drive; they include the cost of threads to
one another. So no other program should run meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq, nnls

import tierstore
from tierstore import EmbeddingBagConfig, KeyedJaggedTensor, TierConfig
from tierstore.cache.tiers.sizes import bytes_for
from tierstore.optim import RowWiseAdagrad
from tierstore.planner import Topology
from tierstore.planner.costs import HELD_BYTES_PER_ROW, WRITE_AMPLIFICATION
from tierstore.rounds import record_bytes

from ._neighbours import LOUD, Neighbours

DIMS = ((16, 96), (24, 48))
"""Dimensions of a collection's tables, two tables of each: two row sizes, so that their tiers compete for the
CPU's caches as in most models."""
_TABLES_PER_DIM = 2
_ROWS = 375_000  # of a table
_IDS, _BAG = 1 << 13, 8  # ids of a table
_HELD = dict(zip(DIMS, (4, 8), strict=True))
"""The memory tiers hold a fourth of one collection's rows, an eighth of the other's, if rows are to miss."""
_DEPTH, _WINDOW, _READ_AHEAD = 2, 8, 16 << 20
_TRIES = 3
_LOADED = 1 << 16  # rows at a time
_WARM = 10
_CHUNK = 8
"""Batches whose mean is one measurement; the median of these is not moved by the moments in which a shared
machine is slower."""
_LEAST_S = 1e-6
"""What a stage takes at least. On a machine with other work, the counters may say that a thread waited for as
long as all its batches took, or longer."""
_SHORT = 3  # as many steps again where they are the shortest
_FEW_MISS = (2.0, 12_500.0)  # many distinct rows, nearly all among those that a fourth of the memory holds
KINDS = {
    "memory": [(0.0, 10.0, _IDS), (1.2, 10.0, _IDS), (*_FEW_MISS, _IDS), (0.6, 10.0, _IDS // 8)],
    "uvm": [
        *((0.0, 10.0, _IDS), (0.7, 10.0, _IDS), (1.2, 10.0, _IDS), (*_FEW_MISS, _IDS)),
        (0.0, 10.0, _IDS // 4),
    ],
    "ssd": [(0.0, 10.0, _IDS), (0.7, 10.0, _IDS), (1.2, 10.0, _IDS), (*_FEW_MISS, _IDS)],
}
"""By place of the rows: popularities P(k-th row) ~ (k + q)^-s as (s, q), and ids of a table."""
_ROUNDS = 3


def one_thread() -> None:
    """Let torch and the engine compute with one thread."""
    torch.set_num_threads(1)
    tierstore.set_num_threads(1)


def _waiting_seconds(bags: Any) -> float:
    """Return the seconds that planning has waited so far, for other batches and for the drive."""
    every = [group.stats.counters for group in bags.engine.groups]
    return sum(c.wait_seconds + c.blocked_seconds for c in every)


def planning_seconds(bags: Any) -> float:
    """Return the seconds that deduplicating, announcing, planning and moving rows have taken so far, without
    waits for other batches and for the drive."""
    every = [group.stats.counters for group in bags.engine.groups]
    return sum(
        c.announce_seconds + c.plan_seconds + c.fetch_seconds + c.move_seconds - c.blocked_seconds
        for c in every
    )


@dataclass(frozen=True)
class Sample:
    """The typical batch of one collection and its seconds by stage.

    ``ids``, ``unique`` (distinct rows), ``cached`` (of these, rows of tables with a policy), ``misses`` and
    ``stored`` (rows from the store) are counts; ``moved``: bytes of missing rows, up and down; ``computed``:
    bytes that lookups and updates touch; ``others``: CPU seconds per second that other processes took;
    ``paced``: 1 where ``fetch`` is by the clock, else 0, by counters that leave out what a batch costs
    whatever its rows; ``reads``: 1 where rows come from the store; ``wall``: seconds by the clock; ``busy``:
    CPU seconds of the training thread; ``groups``: by row size, rows from the store, bytes of a row, and all
    rows of the tables.
    """

    mode: str
    ids: float
    unique: float
    cached: float
    misses: float
    stored: float
    moved: float
    computed: float
    fetch: float
    compute: float
    paced: float
    reads: float
    wall: float
    busy: float
    others: float = 0.0
    groups: tuple[tuple[float, int, int], ...] = ()
    one: float = 1.0

    @staticmethod
    def median(same: Iterable[Sample]) -> Sample:
        """Return the median of samples of one kind: of the undisturbed samples, if there are any."""
        every = list(same)
        calm = [sample for sample in every if sample.others < LOUD] or every
        names = ("fetch", "compute", "wall", "busy", "others")
        values = {name: float(np.median([getattr(sample, name) for sample in calm])) for name in names}
        return replace(calm[0], **values)


def runtime_figures(drives: Mapping[str, Any], steps: int = 20) -> dict[str, Any]:
    """Return fields of a topology, and ``step_s``: what a collection computes per step beside its rows.

    The fields are ``hbm_bw``, ``host_link_bw``, ``index_rows_per_s``, ``row_seconds``, ``overlap_loss`` and
    ``ssd_overlap_loss``, from ``steps`` batches of each kind, three times. ``drives``: the fields that say
    what the drives do.
    """
    samples = [found for mode in KINDS for dims in DIMS for found in _samples(mode, dims, steps)]
    machine = Topology.from_dict({"hbm_per_rank": 1, "host_memory_per_host": 1, "device": "cpu", **drives})
    return fitted(samples, [pair for dims in DIMS for pair in _balanced(dims, steps)], machine)


def _samples(mode: str, dims: tuple[int, ...], steps: int) -> list[Sample]:
    """Return a sample of each of the :data:`KINDS` of a mode, measured in turns with one collection."""
    bags = _collection(mode, dims)
    count = steps * (_SHORT if mode == "memory" else 1)
    try:
        turns = [
            [_calm(bags, mode, popularity, ids, count, seed) for *popularity, ids in KINDS[mode]]
            for seed in range(_ROUNDS)
        ]
    finally:
        bags.close(commit=False)
    return [Sample.median(same) for same in zip(*turns, strict=True)]


def _balanced(dims: tuple[int, ...], steps: int) -> list[tuple[Sample, Sample]]:
    """Return pairs of samples of the same batches, which tell how stages overlap: in the second the training
    thread computes about as long as the first took by the clock."""
    bags, pairs = _collection("uvm", dims), []
    try:
        for seed in range(_ROUNDS):
            for *popularity, ids in KINDS["uvm"][1:3]:
                kind = (bags, "uvm", popularity, ids, steps, seed)
                one, two = (_calm(*kind, dense_steps=each) for each in (1, 2))
                more = (one.wall - one.busy) / max(two.busy - one.busy, 1e-5)
                pairs.append((one, _calm(*kind, dense_steps=1 + max(0, round(more)))))
    finally:
        bags.close(commit=False)
    return pairs


def _calm(
    bags: Any, mode: str, popularity: Iterable[float], count: int, steps: int, seed: int, dense_steps: int = 1
) -> Sample:
    """Return the first sample that no other process disturbed; of three, the least disturbed."""
    found: list[Sample] = []
    while len(found) < _TRIES and (not found or found[-1].others >= LOUD):
        again = seed + _ROUNDS * len(found)
        found.append(_sample(bags, mode, popularity, count, steps, again, dense_steps))
    return min(found, key=lambda sample: sample.others)


def _sample(
    bags: Any, mode: str, popularity: Iterable[float], count: int, steps: int, seed: int, dense_steps: int
) -> Sample:
    """Train the tables for some batches of ``count`` ids each, and a perceptron ``dense_steps`` times with
    each batch. Return the mean batch."""
    random, tables, groups = np.random.default_rng(seed), bags.embedding_bag_configs(), bags.engine.groups
    draws = Draws(_ROWS, *popularity, seed=99)
    drawn = [[draws(random, count) for _ in tables] for _ in range(steps + _WARM)]
    names, lengths = [t.feature_names[0] for t in tables], torch.full((count // _BAG * len(tables),), _BAG)
    batches = [features(names, ids, lengths) for ids in drawn]
    width = sum(table.embedding_dim for table in tables)
    output_grad, input = torch.ones(count // _BAG, width), torch.randn(count // _BAG, width)
    dense = perceptron(width)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.01)
    # Planning sets the pace unless all is in memory; there the counters say what planning takes.
    paces = mode != "memory"
    fetch, compute, wall, busy, counts = [], [], [], [], []
    neighbours, begun = Neighbours(), time.thread_time()
    for batch in tierstore.prefetch(iter(batches), bags, depth=_DEPTH, window=_WINDOW):
        bags(batch).values().backward(output_grad)
        compute.append(time.thread_time() - begun)  # with the time for the prefetch's part of this thread
        for _ in range(dense_steps):
            train_step(dense, optimizer, input)
        busy.append(time.thread_time() - begun)
        tiers = [group.stats.tiers for group in groups]
        counts.append(
            [(t["hbm"].rows - t["hbm"].row_hits, t["ssd"].row_hits if "ssd" in t else 0) for t in tiers]
        )
        wall.append(time.perf_counter())
        fetch.append(wall[-1] - _waiting_seconds(bags) if paces else planning_seconds(bags))
        begun = time.thread_time()
    others = neighbours.share()
    stores = []
    sums = dict.fromkeys(("ids", "unique", "cached", "misses", "stored", "moved", "computed"), 0.0)
    for group, last, warm in zip(groups, counts[-1], counts[_WARM], strict=True):
        size, dim = group.layout.row_bytes, group.layout.dim
        own = [t for t, table in enumerate(tables) if table.embedding_dim == dim]
        unique = float(np.mean([sum(len(np.unique(ids[t])) for t in own) for ids in drawn]))
        missed, stored = (np.array(last) - warm) / (len(counts) - 1 - _WARM)
        sums["ids"] += count * len(own)
        sums["unique"] += unique
        sums["cached"] += unique * paces
        sums["misses"] += missed
        sums["stored"] += stored
        stores.append((float(stored), size, _ROWS * len(own)))
        sums["moved"] += 2 * missed * size
        sums["computed"] += 8 * count * len(own) * dim + 2 * unique * size
    # During the last steps no more batches are announced or planned.
    typical = slice(_WARM, max(_WARM + 1, len(compute) - _WINDOW - _DEPTH))
    stages = {"fetch": np.diff(fetch), "compute": compute, "wall": np.diff(wall), "busy": busy}
    means = {name: max(_middle(values[typical]), _LEAST_S) for name, values in stages.items()}
    return Sample(
        mode, **sums, **means, paced=paces, reads=mode == "ssd", others=others, groups=tuple(stores)
    )


def _middle(seconds: Sequence[float] | NDArray[np.float64]) -> float:
    """Return the median of the means of :data:`_CHUNK` neighbours each."""
    chunks = np.array_split(np.array(seconds), max(1, len(seconds) // _CHUNK))
    return float(np.median([chunk.mean() for chunk in chunks]))


def perceptron(width: int) -> torch.nn.Module:
    """Return what the training thread usually computes beside the bags, whose outputs are ``width`` wide."""
    return torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, features: Any) -> torch.Tensor:
    """Return the loss of a step."""
    optimizer.zero_grad()
    loss = model(features).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


class Draws:
    """Draws ids of ``rows`` rows with P(k-th row) ~ (k + q)^-s, k from 0; ``seed`` says which is the k-th."""

    def __init__(self, rows: int, s: float, q: float, seed: int) -> None:
        weights = (np.arange(rows) + q) ** -s
        self._edges = np.cumsum(weights) / weights.sum()
        self._names = np.random.default_rng(seed).permutation(rows)

    def __call__(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        return self._names[np.searchsorted(self._edges, random.random(count))]


def features(
    names: Sequence[str], ids: Sequence[NDArray[np.int64]], lengths: torch.Tensor
) -> KeyedJaggedTensor:
    """Return the ids of each feature as a batch."""
    return KeyedJaggedTensor(list(names), torch.from_numpy(np.concatenate(ids)), None, lengths)


def _collection(mode: str, dims: tuple[int, ...]) -> Any:
    optimizer = RowWiseAdagrad(lr=0.01)
    tables = [
        EmbeddingBagConfig(_ROWS, dim, f"t{dim}_{i}", feature_names=[f"f{dim}_{i}"])
        for dim in dims
        for i in range(_TABLES_PER_DIM)
    ]
    rows = _ROWS * _TABLES_PER_DIM

    def size(held: int) -> int:
        return sum(bytes_for(held, optimizer.row_bytes(dim), "lookahead") for dim in dims)

    some, every = size(rows // _HELD[dims]), size(rows + rows // 8)
    tiers: dict[str, Any] = {"memory": {"hbm": every, "ssd": 0}, "uvm": {"hbm": some, "uvm": every, "ssd": 0}}
    below = {"hbm": some, "ssd": "10GiB", "read_ahead": _READ_AHEAD}
    config = TierConfig(**tiers.get(mode, below))
    bags = tierstore.EmbeddingBagCollection(tables, config=config, optimizer=optimizer)
    load_zeros(bags, tables)
    return bags


def load_zeros(bags: Any, tables: Iterable[EmbeddingBagConfig]) -> None:
    """Give every row of ``bags`` the value zero, so that it is stored."""
    for table in tables:
        for first in range(0, table.num_embeddings, _LOADED):
            ids = torch.arange(first, min(first + _LOADED, table.num_embeddings))
            bags.load_rows(ids, torch.zeros(len(ids), table.embedding_dim), None, table.name)


def fitted(
    samples: Sequence[Sample], balanced: Sequence[tuple[Sample, Sample]], machine: Topology
) -> dict[str, Any]:
    """Return the planner's terms from samples of all :data:`KINDS` and pairs of :func:`_balanced`.
    ``machine``: says what the drives do."""
    loss = float(np.median([_overlap_loss(*pair) for pair in balanced]))
    machine = replace(machine, overlap_loss=loss)
    samples = [replace(s, fetch=_beside(s.fetch, s.busy, loss)) if s.paced else s for s in samples]
    memory = [sample for sample in samples if sample.mode == "memory"]
    step, lookup, update, per_byte = _fit(memory, "compute", ("one", "ids", "unique", "computed"))
    names = ("paced", "ids", "unique", "cached", "misses", "moved", "reads", "stored")
    batch, per_id, plan, policy, link, link_byte, read, store = _fit(samples, "fetch", names)
    fetched = {"plan": plan, "policy": policy, "link": link, "store": store, "batch": batch, "read": read}
    ssd_loss = float(np.median([_ssd_loss(sample, machine) for sample in samples if sample.reads]))
    return {
        "index_rows_per_s": 1 / max(per_id, 1e-12),
        "hbm_bw": 1 / max(per_byte, 1e-13),
        "host_link_bw": 1 / max(link_byte, 1e-13),
        "step_s": step,
        "overlap_loss": loss,
        "ssd_overlap_loss": ssd_loss,
        "row_seconds": {"lookup": lookup, "update": update, **fetched},
    }


def _beside(step: float, stage: float, loss: float) -> float:
    """Return the other stage of a step of two stages with this loss: half of the step at least."""
    power = np.log(2) / np.log1p(loss)
    return step * max(1 - min(stage / step, 1.0) ** power, 0.5**power) ** (1 / power)


def _overlap_loss(one: Sample, balanced: Sample) -> float:
    """Return the loss by which both samples have the same seconds of the fetching thread."""

    def excess(loss: float) -> float:
        topology = Topology(hbm_per_rank=1, device="cpu", overlap_loss=loss)
        stages = np.array([[_beside(one.wall, one.busy, loss), balanced.busy]])
        return topology.step_seconds(stages, np.zeros(1)) - balanced.wall

    return _root(excess)


def _ssd_loss(sample: Sample, machine: Topology) -> float:
    """Return the loss by which a step takes what the sample did, with the predicted seconds of the drives."""
    own, drives = np.array([[sample.fetch, sample.busy]]), np.array([_drive_seconds(sample, machine)])

    def excess(loss: float) -> float:
        return replace(machine, ssd_overlap_loss=loss).step_seconds(own, drives) - sample.wall

    return _root(excess)


def _drive_seconds(sample: Sample, machine: Topology) -> float:
    """Return the seconds of the drives that the planner predicts for a batch."""
    every, seconds = sum(size * rows for _, size, rows in sample.groups), 0.0
    for stored, size, rows in sample.groups:
        record, room = record_bytes(size), size * rows / every * _READ_AHEAD / (size + HELD_BYTES_PER_ROW)
        seconds += machine.ahead_seconds(stored, record, rows, _WINDOW, room)
        seconds += stored * WRITE_AMPLIFICATION * record / machine.ssd_write_bw
    return seconds


def _root(excess: Callable[[float], float]) -> float:
    """Return the loss of which the excess is zero, or the nearest that a loss can be."""
    least, most = 1e-3, 1.0
    if excess(least) >= 0 or excess(most) <= 0:
        return least if excess(least) >= 0 else most
    return float(brentq(excess, least, most))


def _fit(samples: Sequence[Sample], stage: str, terms: Iterable[str]) -> list[float]:
    """Return non-negative coefficients of a stage's seconds, by relative error."""
    a = np.array([[getattr(sample, name) for name in terms] for sample in samples], dtype=np.float64)
    b = np.array([getattr(sample, stage) for sample in samples])
    scale = np.where(a.any(axis=0), a.max(axis=0), 1.0)  # a term of no sample costs nothing
    found, _ = nnls(a / scale / b[:, None], np.ones(len(b)))
    return [float(value) for value in found / scale]
