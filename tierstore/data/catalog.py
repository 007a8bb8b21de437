"""Datasets by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tierstore.data.criteo import load_criteo
from tierstore.data.dataset import Dataset
from tierstore.data.flights import load_flights
from tierstore.data.movielens import load_movielens
from tierstore.errors import ConfigError

_RECORDED: dict[str, Callable[..., Dataset]] = {
    "flights": load_flights,
    "movielens": load_movielens,
    "criteo": load_criteo,
}
_SYNTHETIC = ("zipf:S", "zipf:S:Q", "mixed", "criteo", "meta2021", "meta2022")


def names() -> list[str]:
    """Return the names that ``load`` knows; S and Q stand for numbers."""
    return [*_RECORDED, *(f"synthetic:{preset}" for preset in _SYNTHETIC)]


def load(spec: str, *, path: str | None = None, seed: int = 0, **options: Any) -> Dataset:
    """Load the dataset named ``spec``, such as "flights" or "synthetic:zipf:0.95"; ``names()`` lists all
    names.

    ``path`` is where recorded data lies. ``seed`` is the seed of generated data; recorded data does not
    depend on it. Other options are the keyword arguments of the dataset's own function
    (docs/reference/datasets.md); None means not given. Raises ConfigError for an unknown name and for an
    option that the dataset does not take.
    """
    name, *parts = spec.split(":")
    given = {key: value for key, value in options.items() if value is not None}
    if path is not None:
        given["path"] = path
    if name == "synthetic":
        return _load_synthetic(spec, parts, seed, given)
    if name not in _RECORDED or parts:
        raise ConfigError(f"unknown data {spec!r}; known are {', '.join(names())}")
    build = _RECORDED[name]
    _check_options(spec, build, given)
    return build(**given)


def _load_synthetic(spec: str, parts: list[str], seed: int, given: dict[str, Any]) -> Dataset:
    from tierstore.data.presets import PRESETS  # compiles with numba

    if not parts or parts[0] not in PRESETS:
        raise ConfigError(f"unknown data {spec!r}; known are {', '.join(names())}")
    build: Callable[..., Dataset] = PRESETS[parts[0]]
    _check_options(spec, build, given)
    positional = [p for p in inspect.signature(build).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    if len(parts) - 1 > len(positional):
        raise ConfigError(f"data {spec!r}: {parts[0]} takes {len(positional)} numbers, not {len(parts) - 1}")
    return build(*parts[1:], seed=seed, **given)


def _check_options(spec: str, build: Callable[..., Dataset], given: dict[str, Any]) -> None:
    parameters = inspect.signature(build).parameters.values()
    positional = {p.name for p in parameters if p.kind is not p.KEYWORD_ONLY} - {"path"}
    taken = [p.name for p in parameters if p.name != "seed" and p.name not in positional]
    unknown = [key for key in given if key not in taken]
    if unknown:
        raise ConfigError(
            f"data {spec!r} does not take {', '.join(unknown)}; it takes {', '.join(taken) or 'no options'}"
        )
