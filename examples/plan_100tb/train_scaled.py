"""Train the 100 TB plan at 1/10,000 scale on this machine, and print predicted beside measured misses.

    torchrun --nproc-per-node 2 examples/plan_100tb/train_scaled.py

Rows of tables, and bytes of the tiers of all hosts together, are divided by the scale. The ranks of this run
share these bytes. The planner plans for them, and the ranks train a model by this plan.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tierstore
from tierstore import EmbeddingBagConfig
from tierstore.cli.plan import read_yaml
from tierstore.data.synthetic import SyntheticDataset, SyntheticTable
from tierstore.planner import EmbeddingShardingPlanner, TableSpec, Topology, Workload
from tierstore.planner.costs import RANK_BUFFERS
from tierstore.planner.files import specs_of_yaml
from tierstore.planner.planner import plan_of
from tierstore.planner.solver import Solution
from tierstore.sharding import DistributedModelParallel

HERE = Path(__file__).parent
DEPTH, WINDOW, READ_AHEAD = 2, 8, 8 << 20


class Model(nn.Module):
    """All embeddings of an example, and a linear layer."""

    def __init__(self, tables: list[TableSpec]) -> None:
        super().__init__()
        configs = [EmbeddingBagConfig(t.num_embeddings, t.embedding_dim, t.name) for t in tables]
        optimizer = tierstore.optim.RowWiseAdagrad(lr=0.02)
        self.bags = tierstore.EmbeddingBagCollection(configs, device="meta", optimizer=optimizer)
        self.over = nn.Linear(sum(t.embedding_dim for t in tables), 1)

    def forward(self, batch: Any) -> torch.Tensor:
        logits = self.over(self.bags(batch.sparse).values()).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)


def scaled_tables(scale: float) -> list[TableSpec]:
    """Return the tables with their rows divided, one row at least."""
    specs = specs_of_yaml(read_yaml(HERE / "tables.yaml"))
    return [replace(spec, num_embeddings=max(1, round(spec.num_embeddings / scale))) for spec in specs]


def scaled_machine(file: str, scale: float, ranks: int) -> Topology:
    """Return a host of CPUs that has the scaled bytes of all hosts, and what each rank needs beside rows."""
    full = Topology.from_dict(read_yaml(HERE / file if (HERE / file).exists() else Path(file)))
    return Topology(
        hosts=1,
        ranks_per_host=ranks,
        hbm_per_rank=int(full.hbm_per_rank * full.world_size / scale / ranks),
        host_memory_per_host=int(full.host_memory_per_host * full.hosts / scale)
        + ranks * (RANK_BUFFERS + READ_AHEAD),
        ssd_per_host=int(full.ssd_per_host * full.hosts / scale),
        device="cpu",
    )


def solved(args: argparse.Namespace, ranks: int) -> Solution:
    """Return the plan, with its predictions. Every rank makes the same, since the search is seeded."""
    work = Workload(args.batch_size, depth=DEPTH, window=WINDOW, read_ahead=READ_AHEAD)
    machine = scaled_machine(args.topology, args.scale, ranks)
    planner = EmbeddingShardingPlanner(machine, workload=work, search_seconds=args.search_seconds)
    solution = planner.solve(scaled_tables(args.scale))
    if solution.caches.missing:
        raise SystemExit(f"the tables do not fit: {solution.caches.missing}")
    return solution


def predicted(solution: Solution) -> dict[str, float]:
    """Return the rows that each table misses in hbm per step, on all ranks together."""
    misses = solution.caches.field("unique") * solution.missed[0]
    placed = zip(solution.placed, solution.shards(), strict=True)
    return {solution.problem.tables[item.table].name: float(misses[shards].sum()) for item, shards in placed}


def counted(model: DistributedModelParallel, names: list[str]) -> torch.Tensor:
    """Return the rows that each table has missed in hbm so far, on all ranks together."""
    (sharded,) = model.sharded.values()
    engine, found = sharded.engine, dict.fromkeys(names, 0.0)
    tables = engine.stats()["tables"]
    for table in engine.tables:
        found[table.origin or table.name] += tables[table.name]["tiers"]["hbm"]["row_misses"]
    total = torch.tensor([found[name] for name in names], dtype=torch.float64)
    dist.all_reduce(total)
    return total


def main() -> None:
    args = arguments()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shared = [solved(args, ranks) if rank == 0 else None]
    dist.broadcast_object_list(shared)
    solution = shared[0]
    plan, tables = plan_of(solution), list(solution.problem.tables)
    names = [table.name for table in tables]
    if rank == 0:
        size = sum(table.num_embeddings * table.row_bytes() for table in tables)
        print(f"{size / 1e9:.1f} GB of rows, {args.batch_size} examples on each of {ranks} ranks")

    torch.manual_seed(1)
    config = tierstore.TierConfig(ssd="100GiB", read_ahead=READ_AHEAD, path=args.folder, overcommit=True)
    model = DistributedModelParallel(Model(tables), plan=plan, config=config)
    dense_optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = SyntheticDataset(
        "criteo-like",
        tuple(SyntheticTable(t.name, t.num_embeddings, 1.1, 100.0, t.pooling_factor) for t in tables),
    )
    own = islice(data.train(args.batch_size), rank, None, ranks)
    batches = tierstore.prefetch(own, model, depth=DEPTH, window=WINDOW)

    def train(steps: int) -> float:
        for _ in range(steps):
            loss = model(next(batches))
            dense_optimizer.zero_grad()
            loss.backward()
            dense_optimizer.step()
        return loss.item()

    train(args.warm)
    before = counted(model, names)
    loss = train(args.steps)
    measured = (counted(model, names) - before) / args.steps
    batches.close()
    if rank == 0:
        report(solution, predicted(solution), dict(zip(names, measured.tolist(), strict=True)), loss)
    model.close(commit=False)
    dist.destroy_process_group()


def report(solution: Solution, expected: dict[str, float], measured: dict[str, float], loss: float) -> None:
    """Print the tables of which rows are missed, and the sums."""
    print("rows that a step misses in hbm:")
    print(f"{'table':8} {'rows':>10} {'cut':20} {'predicted':>10} {'measured':>9}")
    for item in solution.placed:
        spec = solution.problem.tables[item.table]
        pair = expected[spec.name], measured[spec.name]
        if max(pair) >= 1:
            cut = f"{item.option.kind} ({len(item.ranks)})"
            print(f"{spec.name:8} {spec.num_embeddings:10,} {cut:20} {pair[0]:10,.0f} {pair[1]:9,.0f}")
    print(f"{'all':8} {'':10} {'':20} {sum(expected.values()):10,.0f} {sum(measured.values()):9,.0f}")
    print(f"loss {loss:.4f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="topology_8.yaml", help="a file beside this one, or any path")
    parser.add_argument("--scale", type=float, default=10_000)
    parser.add_argument("--batch-size", type=int, default=24, help="examples of a rank (default: 24)")
    parser.add_argument("--warm", type=int, default=300, help="steps before the count (default: 300)")
    parser.add_argument("--steps", type=int, default=100, help="steps that are counted (default: 100)")
    parser.add_argument("--search-seconds", type=float, default=2.0, help="of the planner (default: 2)")
    parser.add_argument("--folder", type=Path, help="of the ranks' stores (default: a temporary one)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
