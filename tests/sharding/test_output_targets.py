"""Places of features in an output that are joined into fewer copies: each value goes where it went before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tierstore import EmbeddingBagConfig, optim
from tierstore.sharding import ShardingEnv, column_wise, row_wise, table_wise
from tierstore.sharding.output_exchange import Source, Target, joined

from . import cases
from .ranks import run


def summand(start: int, here: bool = False) -> Source:
    return Source(start, here, False, None)


def filled(targets: list[Target], buffers: dict[bool, Tensor], floats: int) -> Tensor:
    """Return an output of as many floats, -1 where no target is."""
    output = torch.full((floats,), -1.0)
    for target in targets:
        parts = [target.found_in(buffers[source.here], source) for source in target.sources]
        target.of(output).copy_(sum(parts[1:], parts[0]))
    return output


def features_in_turns(world: int) -> list[Target]:
    """Three of five vectors of four floats on each other rank, which answer in turns; rank 0 is here."""
    starts = [0, *(100 + 60 * rank for rank in range(world - 1))]
    targets = []
    for feature in range(3 * world):
        number, rank = divmod(feature, world)
        sources = [summand(starts[rank] + number * 20, here=rank == 0)]
        targets.append(Target(feature * 4, 12 * world, 5, 4, sources))
    return targets


@pytest.mark.parametrize("world", [1, 2, 4])
def test_features_of_one_rank_are_one_target(world: int) -> None:
    buffers = {True: torch.arange(60.0), False: torch.arange(1000.0, 1000.0 + 100 + 60 * world)}
    targets = features_in_turns(world)
    fewer = joined(targets)
    assert [target.features for target in fewer] == [3] * world
    assert filled(fewer, buffers, 60 * world).equal(filled(targets, buffers, 60 * world))


def test_summands_are_joined_if_all_of_them_follow() -> None:
    buffers = {True: torch.arange(200.0), False: torch.arange(1000.0, 1200.0)}
    targets = [
        Target(8 * at, 24, 2, 8, [summand(16 * at, here=True), summand(second)])
        for at, second in enumerate([0, 16, 40])
    ]
    fewer = joined(targets)
    assert [target.features for target in fewer] == [2, 1]
    assert filled(fewer, buffers, 48).equal(filled(targets, buffers, 48))


def other(feature: int) -> dict[str, Target]:
    """Return targets that would follow two equal features, but for one difference."""
    sources = [summand(8 * feature)]
    return {
        "width": Target(4 * feature, 40, 2, 5, sources),
        "count": Target(4 * feature, 40, 1, 4, sources),
        "stride": Target(4 * feature, 44, 2, 4, sources),
        "distance": Target(4 * feature + 4, 40, 2, 4, sources),
        "start": Target(4 * feature, 40, 2, 4, [summand(8 * feature + 1)]),
        "buffer": Target(4 * feature, 40, 2, 4, [summand(8 * feature, here=True)]),
        "divisor": Target(4 * feature, 40, 2, 4, sources, torch.ones(2, 1)),
        "rows": Target(4 * feature, 40, 2, 4, [Source(8 * feature, False, False, torch.arange(2))]),
        "replica": Target(4 * feature, 40, 2, 4, [Source(8 * feature, False, True, None)]),
    }


@pytest.mark.parametrize("difference", list(other(2)))
def test_targets_that_differ_stay_apart(difference: str) -> None:
    first = [Target(4 * at, 40, 2, 4, [summand(8 * at)]) for at in range(2)]
    assert [target.features for target in joined([*first, other(2)[difference]])] == [2, 1]


def test_targets_of_an_empty_batch() -> None:
    targets = [Target(4 * at, 40, 0, 4, [summand(0)]) for at in range(3)]
    assert filled(joined(targets), {False: torch.zeros(0)}, 12).equal(torch.full((12,), -1.0))


def equal_tables(world: int) -> None:
    env = ShardingEnv.from_process_group()
    configs = [EmbeddingBagConfig(71, 6, f"t{at}", feature_names=["acdb"[at]]) for at in range(4)]
    names, ranks = [config.name for config in configs], list(range(world))
    kinds = {
        "table_wise": {name: table_wise(at % world) for at, name in enumerate(names)},
        "column_wise": dict.fromkeys(names, column_wise([ranks[-1], 0])),
        "row_wise": dict.fromkeys(names, row_wise()),
    }
    data = [*cases.batches(world, 4, empty=world - 1), *cases.batches(world, 2, grow=0)]
    for name, cuts in kinds.items():
        limit = 1e-6 if name == "row_wise" else 0.0  # partial sums of a bag come from several ranks
        cases.check(env, cuts, configs, data, optim.Adam(lr=0.05), tolerance=limit)


@pytest.mark.parametrize("world", [2, 3])
def test_equal_tables_are_the_single_process(world: int) -> None:
    """The sizes of batches repeat and change."""
    run(world, equal_tables, world)
