"""The options of ``tierstore bench hit-rate --hbm``, and the trainings that they simulate."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cache_policies
import tierstore
from tierstore import optim
from tierstore.cache.shares import budget
from tierstore.config import TierConfig
from tierstore.errors import ConfigError
from tierstore.optim import OptimizerSpec
from tierstore.placement import ShardingPlan
from tierstore.result_file import option_errors
from tierstore.simulation import Training, table_rows

if TYPE_CHECKING:
    from tierstore.trace import Trace

_TIERS = ("hbm", "uvm", "ssd", "read_ahead", "ssd_dtype", "uvm_dtype", "state_dtype")
_SHARES = ("hbm", "uvm", "read_ahead")
"""Options that take a share of the tables' bytes, too."""
_MANY_BYTES = 1 << 60
_POLICY, _DIM, _OPTIMIZER = "lookahead", "32", "rowwise-adagrad"
"""What ``tierstore train`` has where nothing else is said."""


@dataclass(frozen=True)
class TierOptions:
    """The options of the command that say which tiers are simulated."""

    policies: list[str]
    tiers: dict[str, Any]
    """Fields of the TierConfig; sizes may be shares of the tables' bytes."""
    dims: list[int]
    optimizer: OptimizerSpec
    plan: ShardingPlan | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> TierOptions | None:
        """Return the options; None where no tiers are asked for. Raises ConfigError for options that are
        wrong, and for options of tiers without ``--hbm`` or ``--plan``."""
        given = {name: getattr(args, name) for name in _TIERS if getattr(args, name) is not None}
        if args.hbm is None and args.plan is None:
            others = [name for name in (*given, "dim", "optimizer") if getattr(args, name) is not None]
            if others:
                option = others[0].replace("_", "-")
                raise ConfigError(f"--{option} is about the tiers of a training; give --hbm SIZE, too")
            return None
        fields = {"depth": "auto" if args.depth is None else _whole(args.depth, "--depth"), **given}
        fields |= {"window": _whole(args.window, "--window"), "admission": args.admission}
        plan = None if args.plan is None else read_plan(args.plan)
        if plan is not None and args.dim is not None:
            raise ConfigError("--dim: the plan has the dimensions of the tables; leave it out")
        optimizer = optim.make((args.optimizer or _OPTIMIZER).replace("-", "_"), lr=0.01)
        names = (args.policies or _POLICY).replace(" ", "").split(",")
        dims = [_dimension(text) for text in (args.dim or _DIM).split(",")]
        options = cls(cache_policies.names() if names == ["all"] else names, fields, dims, optimizer, plan)
        for policy in options.online():
            options.config(policy, _MANY_BYTES)
        return options

    def config(self, policy: Any, table_bytes: int) -> TierConfig:
        """Return the tiers with an eviction policy, for tables of ``table_bytes``, on ranks a rank's part."""
        sizes = {
            name: budget(size, table_bytes, f"--{name.replace('_', '-')}")
            for name, size in self.tiers.items()
            if name in _SHARES
        }
        return TierConfig(policy=policy, **(self.tiers | sizes))

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of the tables, on average."""
        dims = self.dims if self.plan is None else [table.embedding_dim for table in self.plan.tables]
        return round(sum(map(self.optimizer.row_bytes, dims)) / len(dims))

    def online(self) -> list[Any]:
        """Return the policies that a training can have."""
        every = [cache_policies.get(name) for name in self.policies]
        return every if len(every) == 1 else [policy for policy in every if not policy.offline]

    def trainings(self, source: Trace) -> list[Training]:
        """Return what is simulated on ``source``: a training with each policy. Raises ConfigError for a plan
        of other tables, and for a wrong number of dimensions."""
        if self.plan is None:
            if len(self.dims) not in (1, len(source.tables)):
                raise ConfigError(
                    f"--dim has {len(self.dims)} numbers; {source.name} has {len(source.tables)} tables: "
                    f"{', '.join(source.tables)}"
                )
            dims = self.dims * len(source.tables) if len(self.dims) == 1 else self.dims
            sizes = list(zip(table_rows(source), dims, strict=True))
        else:
            sizes = _sizes_of(self.plan, source)
        configs = [
            tierstore.EmbeddingBagConfig(rows, dim, name, feature_names=[name])
            for name, (rows, dim) in zip(source.tables, sizes, strict=True)
        ]
        table_bytes = sum(rows * self.optimizer.row_bytes(dim) for rows, dim in sizes)
        of_rank = table_bytes // (1 if self.plan is None else self.plan.world_size)
        return [
            Training(configs, self.config(policy, of_rank), self.optimizer, self.plan)
            for policy in self.online()
        ]


def _whole(text: str, option: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise ConfigError(f"{option} is a number of batches or auto, not {text!r}")
    return text if text == "auto" else int(text)


def _dimension(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise ConfigError(f"--dim is a whole number of at least 1, or one of each table, not {text!r}")
    return int(text)


def read_plan(path: Path) -> ShardingPlan:
    """Return the sharding plan of a file. Raises ConfigError for a file that has none."""
    with option_errors("--plan", path):
        return ShardingPlan.load(path)


def _sizes_of(plan: ShardingPlan, source: Trace) -> list[tuple[int, int]]:
    """Return rows and dimension of the tables of ``source``, which are those of the plan."""
    planned = {table.name: table for table in plan.tables}
    if set(planned) != set(source.tables):
        raise ConfigError(
            f"--plan is for tables {', '.join(planned)}, and {source.name} has {', '.join(source.tables)}; "
            "plan these tables, or choose columns (--columns)"
        )
    tables = [planned[name] for name in source.tables]
    if len({table.module for table in tables}) > 1:
        raise ConfigError("--plan has tables of several collections; one at a time is simulated")
    return [(table.num_embeddings, table.embedding_dim) for table in tables]
