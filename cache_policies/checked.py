"""Hooks of a policy that check every index: what ``cache_policies.check`` runs before the compiled ones.

numba's compiled code neither checks indices nor tells of exceptions, so a wrong index writes into other
memory. Here a hook, and every compiled function that it reaches by name, is compiled again with checks.
"""

from __future__ import annotations

import functools
import types
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import njit
from numba.core.dispatcher import Dispatcher
from numba.core.errors import NumbaError

from cache_policies.errors import PolicyError
from cache_policies.inner import NO_ENTRY
from cache_policies.policy import Policy

_SHOWN = 8  # elements of an array that an error shows


class CheckedHooks:
    """The hooks of ``policy`` by name, for checks of the policy.

    ``PolicyError`` says which hook asks for an element that an array does not have, changes an argument that
    is not its own, or raises.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        known: dict[tuple[int, bool], Any] = {}
        self._functions = {
            name: _checked(getattr(type(policy), name), known, is_hook=True) for name in policy.hook_names()
        }
        self._state: Any = None

    def begin(self, capacity: int) -> CheckedHooks:
        """Begin with the state of an empty cache of ``capacity`` slots; return the hooks."""
        arrays = self._policy.state(capacity)
        self._state = _state_class(tuple(arrays))(**arrays)
        return self

    def touch(self, slots: np.ndarray, keys: np.ndarray, next_use: np.ndarray, now: int) -> None:
        self._call("touch", {"slots": slots, "keys": keys, "next_use": next_use}, now)

    def insert(self, slots: np.ndarray, keys: np.ndarray, next_use: np.ndarray, now: int) -> None:
        self._call("insert", {"slots": slots, "keys": keys, "next_use": next_use}, now)

    def announce(self, slots: np.ndarray, next_use: np.ndarray, now: int) -> None:
        self._call("announce", {"slots": slots, "next_use": next_use}, now)

    def remove(self, slots: np.ndarray) -> None:
        self._call("remove", {"slots": slots})

    def admit(self, keys: np.ndarray, now: int, admitted: np.ndarray) -> None:
        if "admit" in self._functions:
            self._call("admit", {"keys": keys}, now, admitted)

    def evict(self, n: int, last_use: np.ndarray, pinned_since: int) -> np.ndarray:
        victims = np.full(n, -1, np.int32)
        count = self._call("evict", {"last_use": last_use}, pinned_since, victims, before=(n,))
        if not 0 <= count <= n:
            raise self._fault("evict", f"returned {count}, but {n} victims were asked for")
        return victims[:count]

    def _call(self, hook: str, read: dict[str, np.ndarray], *rest: Any, before: tuple[Any, ...] = ()) -> Any:
        """Call a hook with ``before``, the arrays that it may only ``read``, and ``rest``."""
        kept = {name: array.copy() for name, array in read.items()}
        try:
            result = self._functions[hook](self._state, *before, *read.values(), *rest)
        except IndexError:
            raise self._fault(hook, f"reads or writes outside of an array; {self._sizes(kept)}") from None
        except NumbaError as error:
            raise self._fault(hook, f"does not compile: {error}") from None
        except Exception as error:
            raise self._fault(hook, f"raises {type(error).__name__}: {error}") from error
        for name, array in read.items():
            if not np.array_equal(array, kept[name]):
                raise self._fault(hook, f"changes {name}, which is the caller's")
        return result

    def _sizes(self, read: dict[str, np.ndarray]) -> str:
        state = ", ".join(f"s.{name} has {array.size}" for name, array in self._state._asdict().items())
        given = ", ".join(f"{name} are {_start(array)}" for name, array in read.items())
        return f"elements: {state}; {given}"

    def _fault(self, hook: str, why: str) -> PolicyError:
        return PolicyError(f"policy {self._policy.name!r}: hook {hook} {why}")


@functools.cache
def _state_class(names: tuple[str, ...]) -> Any:
    """Return one class for all capacities: numba compiles a hook again for arguments of another class."""
    return namedtuple("State", names)  # type: ignore[misc]


def _start(array: np.ndarray) -> str:
    return f"{array[:_SHOWN].tolist()}" + (" ..." if array.size > _SHOWN else "")


def _checked(function: Any, known: dict[tuple[int, bool], Any], is_hook: bool = False) -> Any:
    """Return ``function`` compiled with checks of indices, as are the compiled functions that it names."""
    plain = function.py_func if isinstance(function, Dispatcher) else function
    if (id(plain), is_hook) in known:
        return known[id(plain), is_hook]
    scope = dict(plain.__globals__)
    cells = tuple(types.CellType(cell.cell_contents) for cell in plain.__closure__ or ())
    copied = types.FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__, cells or None)
    compiler: Any = njit  # whose types do not know all of its options
    entry = {} if is_hook else NO_ENTRY  # Python calls hooks
    compiled = compiler(copied, boundscheck=True, error_model="numpy", **entry)
    known[id(plain), is_hook] = compiled
    for name in set(_names(plain.__code__)):
        if isinstance(scope.get(name), Dispatcher):
            scope[name] = _checked(scope[name], known)
    for cell in cells:
        if isinstance(cell.cell_contents, Dispatcher):
            cell.cell_contents = _checked(cell.cell_contents, known)
    return compiled


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
