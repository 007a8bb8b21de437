"""``tierstore bench NAME ...``: runs a benchmark of the ``bench`` folder, installed as ``tierstore_bench``.

A benchmark is a module there with ``SUMMARY: str``, ``add_arguments(parser)`` and ``run(args) -> int``. Its
file name is its name, with ``-`` for ``_``; modules whose name starts with ``_`` are not benchmarks. Slow
imports are made in ``run``, so that the list of benchmarks is quick.
"""

from __future__ import annotations

import argparse
import pkgutil
from importlib import import_module
from types import ModuleType
from typing import Any

from tierstore.cli.arguments import check_arguments
from tierstore.cli.messages import ArgumentParser
from tierstore.errors import ConfigError


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="run a benchmark; without a name, list them",
        description="Run a benchmark. Without a name, list all of them.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the benchmark")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments; --help lists them"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    if args.name is None:
        print_benchmarks()
        return 0
    module = find_benchmark(args.name)
    parser = ArgumentParser(prog=f"tierstore bench {args.name}", description=module.SUMMARY)
    module.add_arguments(parser)
    own = parser.parse_args(args.arguments)
    check_arguments(own)
    return int(module.run(own))


def benchmark_names() -> list[str]:
    try:
        package = import_module("tierstore_bench")
    except ModuleNotFoundError:
        raise ConfigError("the benchmarks come with the installed package: pip install .") from None
    names = (info.name for info in pkgutil.iter_modules(package.__path__) if not info.ispkg)
    return sorted(name.replace("_", "-") for name in names if not name.startswith("_"))


def find_benchmark(name: str) -> ModuleType:
    names = benchmark_names()
    if name not in names:
        raise ConfigError(f"no benchmark {name!r}; there are: {', '.join(names) or 'none'}")
    return import_module(f"tierstore_bench.{name.replace('-', '_')}")


def print_benchmarks() -> None:
    print("usage: tierstore bench NAME [-h] ...\n\nbenchmarks:")
    for name in benchmark_names():
        print(f"  {name:<16} {find_benchmark(name).SUMMARY}")
