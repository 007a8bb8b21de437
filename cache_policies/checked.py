"""Hooks of a policy that check every index: what ``cache_policies.check`` runs before the compiled ones.

numba's compiled code neither checks indices nor tells of exceptions, so a wrong index writes into other
memory. Here a hook is compiled again with checks, and so is every compiled function that it reaches: by name
or as an attribute of a module.
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
    is not its own, or raises. It is raised at once for functions that cannot be checked.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        known: dict[tuple[int, bool], Any] = {}
        try:
            self._functions = {
                name: _checked(getattr(type(policy), name), known, is_hook=True)
                for name in policy.hook_names()
            }
        except PolicyError as error:
            raise PolicyError(f"policy {policy.name!r}: {error}") from None
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
    names = set(_names(plain.__code__))
    for name in names & scope.keys():
        scope[name] = _checked_value(scope[name], names, known)
    for cell in cells:
        cell.cell_contents = _checked_value(cell.cell_contents, names, known)
    return compiled


def _checked_value(value: Any, names: set[str], known: dict[tuple[int, bool], Any]) -> Any:
    """Return what takes the place of a variable of a function whose code has ``names``: its variables, and
    the attributes that it asks for. Raises PolicyError for a tuple of compiled functions: numba does not tell
    of what such a function raises."""
    if isinstance(value, Dispatcher):
        return _checked(value, known)
    if isinstance(value, types.ModuleType):
        return _checked_module(value, names, known, {})
    if isinstance(value, tuple) and any(isinstance(one, Dispatcher) for one in value):
        called = ", ".join(one.py_func.__name__ for one in value if isinstance(one, Dispatcher))
        raise PolicyError(f"functions in a tuple cannot be checked ({called}): call each by its name")
    return value


def _checked_module(
    module: types.ModuleType, names: set[str], known: dict[tuple[int, bool], Any], made: dict[int, Any]
) -> types.ModuleType:
    """Return a copy of ``module``, whose functions called by one of ``names`` check indices. A module that
    has none is returned itself, for numba knows numpy's functions by their module. ``made`` has the copies by
    their modules, since two modules may have each other."""
    if id(module) in made:
        return made[id(module)]
    if not _has_compiled(module, names, set()):
        return module
    copied = made[id(module)] = types.ModuleType(module.__name__)
    copied.__dict__.update(module.__dict__)
    for name, value in _named(module, names):
        if isinstance(value, types.ModuleType):
            copied.__dict__[name] = _checked_module(value, names, known, made)
        else:
            copied.__dict__[name] = _checked_value(value, names, known)
    return copied


def _has_compiled(module: types.ModuleType, names: set[str], seen: set[int]) -> bool:
    """Return whether attributes called by ``names`` lead from ``module``, past no module in ``seen``, to a
    compiled function."""
    if id(module) in seen:
        return False
    seen.add(id(module))
    return any(
        _has_compiled(value, names, seen)
        if isinstance(value, types.ModuleType)
        else isinstance(value, Dispatcher | tuple)
        for _, value in _named(module, names)
    )


def _named(module: types.ModuleType, names: set[str]) -> list[tuple[str, Any]]:
    """Return the attributes of ``module`` that have one of ``names``."""
    return [(name, vars(module)[name]) for name in sorted(names & vars(module).keys())]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
