"""Random training loops over a prefetch: modules of several row layouts are called in any order, in threads,
with changed ids, and without a backward pass for a while. Every run equals the one in memory without
prefetch.

``python random_orders.py first-seed seeds`` ends with a traceback of all threads where a loop does not go on.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

import tierstore
from tierstore import TieredEmbeddingBag, optim
from tierstore.cache.tiers.sizes import bytes_for

ROWS = 400
SECONDS = 60  # for one run, which takes a fraction of one


def build(dims: list[int], slots: int | None, shared: bool) -> list[Any]:
    """Modules of these dimensions; ``shared``: in one engine, which has a tier group per dimension."""
    sizes = [bytes_for(slots or 1, SPEC.row_bytes(dim), "lookahead") for dim in dims]

    def config(*sizes: int) -> tierstore.TierConfig:
        return tierstore.TierConfig(hbm="all" if slots is None else sum(sizes), engine="memory")

    if not shared:
        return [
            TieredEmbeddingBag(ROWS, dim, config=config(size), optimizer=SPEC, seed=number)
            for number, (dim, size) in enumerate(zip(dims, sizes, strict=True))
        ]
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.EmbeddingBag(ROWS, dim) for dim in dims])
    tierstore.offload(model, config(*sizes), SPEC)
    return list(model)


SPEC = optim.Adagrad(lr=0.1)


def everything(modules: list[Any]) -> list[torch.Tensor]:
    found = []
    for module in modules:
        found.append(module.rows(torch.arange(ROWS)))
        found += module.optimizer_rows(torch.arange(ROWS)).values()
    return found


def changed(choose: random.Random, ids: torch.Tensor) -> torch.Tensor:
    """The ids that a module gets: those of the batch, or others, in the same memory or not."""
    kind = choose.choice(["same"] * 6 + ["clone", "in place", "numpy", "data", "set back"])
    if kind == "clone":
        return ids.clone()
    if kind == "in place":
        ids.add_(1).remainder_(ROWS)
    elif kind == "numpy":
        array = ids.numpy()
        array[0] = (array[0] + 7) % ROWS
    elif kind == "data":
        ids.data[-1] = (ids.data[-1] + 3) % ROWS
    elif kind == "set back":
        ids.add_(1)
        ids.sub_(1)
    return ids


def forward(module: Any, ids: torch.Tensor, out: list[torch.Tensor]) -> Callable[[], None]:
    place = len(out)
    out.append(torch.empty(0))

    def run() -> None:
        out[place] = module(ids)

    return run


def train(seed: int, modules: list[Any], batches: Iterable[Any]) -> list[torch.Tensor]:
    choose = random.Random(seed)
    waiting: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    for batch in batches:
        order = list(range(len(modules)))
        choose.shuffle(order)
        order = [number for number in order if choose.random() < 0.9] + choose.choices(
            order, k=choose.randint(0, 1)
        )
        outputs: list[torch.Tensor] = []
        calls = [forward(modules[n], changed(choose, batch[n]), outputs) for n in order]
        if choose.random() < 0.2:
            extra = torch.from_numpy(batch[0].numpy().copy())
            with choose.choice([torch.no_grad, torch.inference_mode])():
                found.append(modules[0](extra + 0).clone())
                found.append(modules[0](batch[0]).clone())
        if choose.random() < 0.3:
            threads = [threading.Thread(target=call) for call in calls]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            for call in calls:
                call()
        waiting += outputs
        if choose.random() < 0.5 and waiting:
            update(waiting, found)
    if waiting:
        update(waiting, found)
    return found


def update(waiting: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    # one after the other: which of several lookups of a row is updated first is torch's affair
    for out in waiting:
        (out.sin() * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        found.append(out.detach().clone())
    waiting.clear()


def drawn(seed: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randint(0, ROWS, (6, 4), generator=generator) for _ in range(3)] for _ in range(16)]


def run(seed: int) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    choose = random.Random(seed)
    dims = choose.choice([[4, 8], [8, 4, 16], [4, 4], [4, 8, 4]])
    shared = choose.random() < 0.5
    want_modules = build(dims, None, shared)
    want = train(seed, want_modules, drawn(seed)) + everything(want_modules)
    modules = build(dims, choose.choice([24, 40, 80, 200]), shared)
    inputs = {modules[n]: lambda batch, n=n: (batch[n],) for n in range(len(dims))}
    ahead = tierstore.prefetch(
        drawn(seed), modules, inputs=inputs, depth=choose.randint(0, 3), window=choose.randint(0, 5)
    )
    found = train(seed, modules, ahead) + everything(modules)
    for module in modules:
        module.close()
    assert len(found) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)), f"seed {seed} computes otherwise"


def main(first: int, seeds: int) -> None:
    torch.set_num_threads(1)
    for seed in range(first, first + seeds):
        run(seed)
    faulthandler.cancel_dump_traceback_later()
    print(f"{seeds} loops of 16 batches")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
