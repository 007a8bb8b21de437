"""Loops over prefetched batches, with other operations in their middle."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from random import Random
from typing import Any

import tierstore
from tests.modules.module_machine import Machine
from tests.modules.module_sides import STYLES, arguments_of, call_of, item_of


class Left(Exception):
    """Raised inside of a loop, a block or a hook."""


class Loops(Machine):
    """A machine whose subject is prefetched."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        self.loops: list[Any] = []
        """Passes of prefetch that were left without their end."""
        self.looping = 0

    @property
    def model(self) -> Any:
        """What is prefetched."""
        return self.subject

    @abstractmethod
    def operate(self, random: Random, inner: bool = False) -> None:
        """Do one operation; ``inner``: inside of a loop over prefetched batches."""

    def _loop(self, random: Random) -> None:
        batches = [self.loop_batch(random) for _ in range(random.randint(1, 9))]
        data = [self.item(batch) for batch in batches]
        style, same = random.choice(STYLES), random.random() < 0.7
        options: dict[str, Any] = {"depth": random.choice([0, 1, 2, 3, "auto"])}
        options |= {"window": random.choice([0, 2, 5, "auto"])}
        if random.random() < 0.3:
            options["inputs"] = {self.subject: arguments_of}
        stop, after = random.choice(["end", "end", "break", "error", "open"]), random.randint(1, len(data))
        self.note(f"      {len(data)} {style if same else 'any'} {options} {stop} after {after}")
        if stop != "open":
            self.end_loops()
        prefetched = tierstore.prefetch(data, self.model, **options)
        self.looping += 1
        try:
            for number, item in enumerate(prefetched, start=1):
                assert item is data[number - 1]
                self._body(random, batches[number - 1], style if same else random.choice(STYLES))
                if stop == "error" and number == after:
                    raise Left
                if stop in ("break", "open") and number == after:
                    break
        except Left:
            pass
        self.looping -= 1
        if stop == "open":
            self.loops.append(prefetched)
        else:
            prefetched.close()

    def loop_batch(self, random: Random) -> Any:
        """A batch of a loop."""
        return self.batch(random)

    def item(self, batch: Any) -> Any:
        """What a loader yields for a batch."""
        return item_of(call_of(batch, self.shape).subject)

    def _body(self, random: Random, batch: Any, style: str) -> None:
        for _ in range(random.choice([0, 0, 1, 2])):
            self.operate(random, inner=True)
        if random.random() < 0.9:
            self.train_on(random, batch, style)
        for _ in range(random.choice([0, 0, 1])):
            self.operate(random, inner=True)

    def end_loops(self) -> None:
        for prefetched in self.loops:
            prefetched.close()
        self.loops.clear()
