"""Policies of users: found by ``module:Class``, and checked for writes out of bounds and other faults."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import numpy as np
import pytest
from numba import njit

import cache_policies
from bench import hit_rate
from cache_policies import PolicyError, lists
from cache_policies.fifo import Fifo
from cache_policies.lists import push_newest, unlink
from tierstore import TierConfig
from tierstore.cli.main import main
from tierstore.errors import ConfigError

OWN = """
from cache_policies import Policy
from cache_policies.fifo import Fifo

class Mine(Fifo):
    name = "mine"

class Nameless(Policy):
    pass

class Bare(Policy):
    name = "bare"

class Picky(Fifo):
    name = "picky"
    def __init__(self, share):
        self.share = share

number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which has the module my_policies."""
    (tmp_path / "my_policies.py").write_text(OWN)
    (tmp_path / "broken_policies.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    for name in ("my_policies", "broken_policies"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_class_is_found_in_the_current_folder():
    before = list(sys.path)
    policy = cache_policies.get("my_policies:Mine")
    assert (policy.name, type(policy).__name__) == ("mine", "Mine")
    assert TierConfig(policy="my_policies:Mine").policy == "my_policies:Mine"
    assert sys.path == before


WRONG = {
    "my_policies:Other": "module my_policies has no Other",
    "gone_policies:Mine": "gone_policies cannot be imported: No module named",
    "broken_policies:Mine": "importing broken_policies raised ZeroDivisionError",
    "my_policies:number": "is no subclass of cache_policies.Policy",
    "my_policies:Nameless": "Nameless.name is empty",
    "my_policies:Bare": "'bare' defines no state, no insert, no remove, no evict",
    "my_policies:Picky": "give every parameter a default",
    "my_policies:": "write module:Class",
    ":Mine": "write module:Class",
    "mru": "unknown policy 'mru'; known: lookahead.* or module:Class",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_names(name):
    with pytest.raises(PolicyError, match=WRONG[name]):
        cache_policies.get(name)
    with pytest.raises(ConfigError, match=WRONG[name]):
        TierConfig(policy=name)


def test_commands_take_a_class(folder, monkeypatch, capsys):
    monkeypatch.setattr("tierstore.data.synthetic.TEST_EXAMPLES", 64)
    small = ["--tables", "1", "--rows", "2000", "--batch-size", "64", "--hbm", "32KiB", "--dim", "8"]
    data = ["--data", "synthetic:zipf:1.05", "--steps", "30", "--threads", "1"]
    assert main(["train", *data, *small, "--policy", "my_policies:Mine", "--json", "t.json"]) == 0
    parser = argparse.ArgumentParser()
    hit_rate.add_arguments(parser)
    own = ["--batches", "30", "--policy", "my_policies:Mine,fifo", "--json", "s.json"]
    assert hit_rate.run(parser.parse_args(["synthetic:zipf:1.05", *small, *own])) == 0
    live = json.loads(Path("t.json").read_text())["hit_rate"]
    mine, fifo = json.loads(Path("s.json").read_text())["trainings"]
    assert mine["policy"] == "mine"
    for training in (mine, fifo):  # which decide alike
        tiers = training["ranks"][0]["tiers"]
        assert {name: tier["hit_rate"] for name, tier in tiers.items()} == live
    capsys.readouterr()
    assert main(["train", *data, *small, "--policy", "my_policies:Bare"]) != 0
    assert "defines no state" in capsys.readouterr().err


def test_the_check_as_a_command(folder):
    (folder / "faulty.py").write_text(
        textwrap.dedent(
            """
            from cache_policies.fifo import Fifo

            class Beyond(Fifo):
                name = "beyond"

                @staticmethod
                def remove(s, slots):
                    for slot in slots:
                        s.next[s.next.size + slot] = 0
            """
        )
    )
    command = [sys.executable, "-m", "cache_policies"]
    found = subprocess.run([*command, "my_policies:Mine", "faulty:Beyond"], capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stdout == "my_policies:Mine: keeps the contract\n"
    assert "faulty:Beyond: policy 'beyond': hook remove reads or writes outside of an array" in found.stderr
    assert subprocess.run(command, capture_output=True).returncode == 2


class WritesBeyond(Fifo):
    name = "writes_beyond"

    @staticmethod
    def touch(s, slots, keys, next_use, now):
        for slot in slots:
            s.prev[slot + 2 * s.prev.size] = 1


@njit
def _helps(array, at):
    array[at + array.size] = 7


helpers = (_helps,)


class HelperWritesBeyond(Fifo):
    name = "helper_writes_beyond"

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for slot in slots:
            push_newest(s.prev, s.next, s.next.size - 1, slot)
            _helps(s.next, slot)


inner = types.ModuleType("inner")
inner.inner, inner.helps = inner, _helps  # type: ignore[attr-defined]
outer = types.ModuleType("outer")
outer.inner, outer.np = inner, np  # type: ignore[attr-defined]


class ModuleWritesBeyond(Fifo):
    name = "module_writes_beyond"

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for slot in slots:
            lists.push_newest(s.prev, s.next, s.next.size - 1, slot)
        lists.push_newest(s.prev, s.next, s.next.size, np.int64(0))


class ModuleInModuleWritesBeyond(Fifo):
    name = "module_in_module_writes_beyond"

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for slot in slots:
            lists.push_newest(s.prev, s.next, s.next.size - 1, slot)
            outer.inner.inner.helps(s.next, outer.np.int64(slot))


class TupleWritesBeyond(Fifo):
    name = "tuple_writes_beyond"

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for slot in slots:
            lists.push_newest(s.prev, s.next, s.next.size - 1, slot)
            helpers[0](s.next, slot)


def _closed_over(module):
    class ClosureWritesBeyond(Fifo):
        name = "closure_writes_beyond"

        @staticmethod
        def insert(s, slots, keys, next_use, now):
            for slot in slots:
                push_newest(s.prev, s.next, s.next.size - 1, slot)
                module.helps(s.next, slot)

    return ClosureWritesBeyond


class ReadsBeforeTheStart(Fifo):
    name = "reads_before_the_start"

    @staticmethod
    def touch(s, slots, keys, next_use, now):
        for slot in slots:
            s.prev[slot] = s.prev[-1 - s.prev.size]


class WritesTooManyVictims(Fifo):
    name = "writes_too_many_victims"

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        for slot in range(last_use.size + 1):
            victims[slot] = slot
        return n


class ReturnsTooMany(Fifo):
    name = "returns_too_many"

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        return n + 1


class ReturnsSlotsTwice(Fifo):
    name = "returns_slots_twice"

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        sentinel, count = s.next.size - 1, 0
        slot = s.next[sentinel]
        while slot != sentinel and count < n:
            after = s.next[slot]
            if last_use[slot] < pinned_since:
                unlink(s.prev, s.next, slot)
                victims[count] = slot
                count += 1
            slot = after
        if count > 1:
            victims[1] = victims[0]
        return count


class ReturnsSlotsBeyond(Fifo):
    name = "returns_slots_beyond"

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        for i in range(n):
            victims[i] = last_use.size + i
        return n


class ChangesItsArguments(Fifo):
    name = "changes_its_arguments"

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for i in range(slots.size):
            push_newest(s.prev, s.next, s.next.size - 1, slots[i])
            keys[i] = 0


class Raises(Fifo):
    name = "raises"

    @staticmethod
    def touch(s, slots, keys, next_use, now):
        raise ValueError("not today")


class DoesNotCompile(Fifo):
    name = "does_not_compile"

    @staticmethod
    def touch(s, slots, keys, next_use, now):
        s.no_such_array[0] = 1


class AdmitsHalf(Fifo):
    name = "admits_half"

    @staticmethod
    def admit(s, keys, now, admitted):
        admitted[:] = 2


FAULTS = {
    WritesBeyond: "hook touch reads or writes outside of an array; elements: s.prev has 2",
    HelperWritesBeyond: "hook insert reads or writes outside of an array",
    ModuleWritesBeyond: "hook insert reads or writes outside of an array",
    ModuleInModuleWritesBeyond: "hook insert reads or writes outside of an array",
    TupleWritesBeyond: r"'tuple_writes_beyond': functions in a tuple cannot be checked \(_helps\): call each",
    _closed_over(inner): "hook insert reads or writes outside of an array",
    ReadsBeforeTheStart: "hook touch reads or writes outside of an array",
    WritesTooManyVictims: "hook evict reads or writes outside of an array",
    ReturnsTooMany: r"hook evict returned \d+, but \d+ victims were asked for",
    ReturnsSlotsTwice: r"evict returned a slot twice: \[\d+\]",
    ReturnsSlotsBeyond: r"evict returned slot \[\d+\], but slots are 0 to",
    ChangesItsArguments: "hook insert changes keys, which is the caller's",
    Raises: "hook touch raises ValueError: not today",
    DoesNotCompile: "hook touch does not compile",
    AdmitsHalf: "admit set admitted to a number that is neither 0 nor 1",
}


@pytest.mark.parametrize("policy", FAULTS, ids=lambda policy: policy.name)
def test_faults_are_found_and_named(policy):
    with pytest.raises(PolicyError, match=FAULTS[policy]):
        cache_policies.check(policy, plans=30)


def test_a_negative_index_within_the_array_is_no_fault():
    class FromTheEnd(Fifo):
        name = "from_the_end"

        @staticmethod
        def touch(s, slots, keys, next_use, now):
            s.prev[-1] = s.prev[-1]

    cache_policies.check(FromTheEnd, plans=20)
