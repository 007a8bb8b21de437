"""Makes C function pointers of a policy's Python hooks: signatures, compilation, the compile cache."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import subprocess
import sys
import time
import types as pytypes
from collections import namedtuple
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher
from numba.core.errors import NumbaError
from numba.extending import intrinsic

from cache_policies.disk_cache import DiskCache
from cache_policies.errors import PolicyError
from cache_policies.inner import inlined

_log = logging.getLogger(__name__)

_COMPILING = "TIERSTORE_COMPILING"  # set in processes that fill the compile cache

_state, _n = types.voidptr, types.int64
_i32, _i64, _u64 = (types.CPointer(t) for t in (types.int32, types.int64, types.uint64))
_SIGNATURES = {
    "touch": types.void(_state, _i32, _u64, _i64, _n, types.int64),
    "insert": types.void(_state, _i32, _u64, _i64, _n, types.int64),
    "announce": types.void(_state, _i32, _i64, _n, types.int64),
    "remove": types.void(_state, _i32, _n),
    "evict": types.int64(_state, _n, _i64, types.int64, _i32),
    "admit": types.void(_state, _u64, _n, types.int64, types.CPointer(types.uint8)),
    "loop": types.void(_state, types.voidptr),  # of the simulator only, see run_loop
}
_PARAMETERS = {
    "touch": (
        "state, slots, keys, next_use, n, now",
        "carray(slots, n), carray(keys, n), carray(next_use, n), now",
    ),
    "insert": (
        "state, slots, keys, next_use, n, now",
        "carray(slots, n), carray(keys, n), carray(next_use, n), now",
    ),
    "announce": ("state, slots, next_use, n, now", "carray(slots, n), carray(next_use, n), now"),
    "remove": ("state, slots, n", "carray(slots, n)"),
    "evict": (
        "state, n, last_use, pinned_since, victims",
        "n, carray(last_use, state_[0]), pinned_since, carray(victims, n)",
    ),
    "admit": ("state, keys, n, now, admitted", "carray(keys, n), now, carray(admitted, n)"),
}


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    """Convert an int64 address to a void pointer."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), codegen


def _caller(result: Any) -> Any:
    @intrinsic
    def call(typingctx: Any, address: Any, arguments: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = cgutils.ir.IntType(64)
            returns = word if result == types.int64 else cgutils.ir.VoidType()
            function = cgutils.ir.FunctionType(returns, [word] * len(arguments))
            values = [
                context.cast(builder, builder.extract_value(args[1], i), kind, types.int64)
                for i, kind in enumerate(arguments)
            ]
            called = builder.call(builder.inttoptr(args[0], function.as_pointer()), values)
            return called if result == types.int64 else context.get_dummy_value()

        return result(types.int64, arguments), codegen

    return call


#: Call a hook from compiled code: ``(address, tuple of numbers and array addresses)``.
call_void = _caller(types.void)
call_int64 = _caller(types.int64)


class HookOwner(Protocol):
    """The owner of compiled hooks: a policy or an admission filter (``cache_policies.policy.Hooked``)."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    def state(self, capacity: int) -> dict[str, np.ndarray]: ...

    def hook_names(self) -> list[str]: ...


class Compiled:
    """State for one cache and the addresses of the hooks. Owns the arrays; keep it alive while hooks run.

    ``state_address`` is the ``void* state`` of every hook: an int64 table of capacity, then address and
    length of each array. Hooks may be called from any thread, one at a time, with or without the GIL. The
    methods of the same names call them on NumPy arrays.
    """

    def __init__(self, owner: HookOwner, capacity: int) -> None:
        arrays = owner.state(capacity)
        for field, array in arrays.items():
            if not (isinstance(array, np.ndarray) and array.ndim == 1 and array.flags.c_contiguous):
                raise PolicyError(
                    f"{owner.kind} {owner.name!r}: state {field!r} must be a contiguous 1-d NumPy array"
                )
        self.name = owner.name
        self.capacity = capacity
        self.arrays = arrays
        self.nbytes = sum(array.nbytes for array in arrays.values())
        self._table = _new_table(capacity, arrays)
        self.state_address: int = self._table.ctypes.data
        self.hooks: dict[str, int] = _addresses(owner, {name: array.dtype for name, array in arrays.items()})
        self._call = {hook: _ctypes_function(hook, address) for hook, address in self.hooks.items()}

    def touch(self, slots: np.ndarray, keys: np.ndarray, next_use: np.ndarray, now: int) -> None:
        self._call["touch"](self.state_address, *map(_address, (slots, keys, next_use)), slots.size, now)

    def insert(self, slots: np.ndarray, keys: np.ndarray, next_use: np.ndarray, now: int) -> None:
        self._call["insert"](self.state_address, *map(_address, (slots, keys, next_use)), slots.size, now)

    def announce(self, slots: np.ndarray, next_use: np.ndarray, now: int) -> None:
        self._call["announce"](self.state_address, _address(slots), _address(next_use), slots.size, now)

    def admit(self, keys: np.ndarray, now: int, admitted: np.ndarray) -> None:
        if "admit" in self.hooks:
            self._call["admit"](self.state_address, _address(keys), keys.size, now, _address(admitted))

    def remove(self, slots: np.ndarray) -> None:
        self._call["remove"](self.state_address, _address(slots), slots.size)

    def evict(self, n: int, last_use: np.ndarray, pinned_since: int) -> np.ndarray:
        victims = np.empty(n, np.int32)
        count = self._call["evict"](
            self.state_address, n, _address(last_use), pinned_since, _address(victims)
        )
        return victims[:count]


def _address(array: np.ndarray) -> int:
    assert array.flags.c_contiguous
    assert array.dtype in (np.int32, np.int64, np.uint64, np.uint8)
    return array.ctypes.data


def _ctypes_function(hook: str, address: int) -> Any:
    signature = _SIGNATURES[hook]
    kinds = [ctypes.c_int64 if t == types.int64 else ctypes.c_void_p for t in signature.args]
    result = ctypes.c_int64 if signature.return_type == types.int64 else None
    return ctypes.CFUNCTYPE(result, *kinds)(address)


# Digest of code and layout → hook → compiled C function, for the life of the process.
_compiled: dict[str, dict[str, Any]] = {}


def _addresses(owner: HookOwner, fields: dict[str, np.dtype]) -> dict[str, int]:
    functions = {hook: _function(owner, hook) for hook in owner.hook_names()}
    digest = _digest([*functions.values(), repr(list(fields.items()))])
    if digest not in _compiled:
        _compiled[digest] = {
            hook: _compile(owner, hook, function, fields, digest) for hook, function in functions.items()
        }
    return {hook: function.address for hook, function in _compiled[digest].items()}


def _function(owner: HookOwner, hook: str) -> Any:
    function = getattr(type(owner), hook)
    return function.py_func if isinstance(function, Dispatcher) else function


@cache
def _state_class(fields: tuple[str, ...]) -> type:
    """Return the class of the tuple that hooks see: one for all, so that numba compiles shared code once."""
    return namedtuple("State", fields)  # type: ignore[misc, no-any-return]


def _compile(owner: HookOwner, hook: str, function: Any, fields: dict[str, np.dtype], digest: str) -> Any:
    """Compile the C function of one hook: it rebuilds the arrays from the table and calls the hook."""
    parameters, arguments = _PARAMETERS[hook]
    return _wrap(owner, hook, parameters, [("state", fields)], arguments, inlined(function), digest)


def _wrap(
    owner: HookOwner,
    hook: str,
    parameters: str,
    tables: list[tuple[str, dict[str, np.dtype]]],
    arguments: str,
    function: Any,
    digest: str,
) -> Any:
    """Compile the C function ``hook(parameters)``, which calls ``function`` with arrays and ``arguments``.

    The arrays are a named tuple for each of ``tables``: the parameter that points to the table, its arrays.
    """
    scope: dict[str, Any] = {
        "function": function,
        "carray": carray,
        "pointer": _pointer,
        "int64": np.int64,
        "__name__": __name__,
    }
    name = f"{owner.name}_{hook}" if owner.name.isidentifier() else hook
    lines = [f"def {name}({parameters}):"]
    for table, fields in tables:
        views = ", ".join(
            f"carray(pointer({table}_[{2 * i + 1}]), {table}_[{2 * i + 2}], {table}_{field})"
            for i, field in enumerate(fields)
        )
        lines += [
            f"    {table}_ = carray({table}, {2 * len(fields) + 1}, int64)",
            f"    {table}_arrays = {table}_class({views})",
        ]
        scope |= {f"{table}_{field}": np.dtype(dtype).type for field, dtype in fields.items()}
        scope[f"{table}_class"] = _state_class(tuple(fields))
    inputs = ", ".join(f"{table}_arrays" for table, _ in tables)
    lines.append(f"    return function({inputs}, {arguments})\n")
    exec(compile("\n".join(lines), __file__, "exec"), scope)
    return _build(scope[name], owner, hook, digest)


def run_loop(owner: HookOwner, compiled: Compiled, make: Any, arrays: dict[str, np.ndarray]) -> None:
    """Run ``make(hooks)(s, t)`` compiled, with the hooks inlined.

    ``s`` are the arrays of ``compiled``, a cache of ``owner``; ``t`` is a named tuple of ``arrays``.
    """
    hooks = {hook: _function(owner, hook) for hook in owner.hook_names()}
    layouts = [{name: array.dtype for name, array in group.items()} for group in (compiled.arrays, arrays)]
    digest = _digest([make, *hooks.values(), repr([list(layout.items()) for layout in layouts])])
    if digest not in _compiled:
        function = inlined(make({hook: inlined(function) for hook, function in hooks.items()}))
        tables = [("state", layouts[0]), ("trace", layouts[1])]
        wrapped = _wrap(owner, "loop", "state, trace", tables, "", function, digest)
        _compiled[digest] = {"loop": wrapped}
    table = _new_table(0, arrays)
    _ctypes_function("loop", _compiled[digest]["loop"].address)(compiled.state_address, table.ctypes.data)


def _new_table(first: int, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return the table of a hook: a number, then address and length of each array."""
    rows = [(array.ctypes.data, array.size) for array in arrays.values()]
    return np.array([first, *(number for row in rows for number in row)], np.int64)


def _build(wrapper: Any, owner: HookOwner, hook: str, digest: str) -> Any:
    """Compile through the on-disk cache; where that cannot be used, without."""
    signature = _SIGNATURES[hook]
    function = CFunc(wrapper, (signature.args, signature.return_type), {}, {"error_model": "numpy"})
    try:
        builtin = None if hook == "loop" else _builtin(owner)
        function._cache = _HookCache(wrapper, digest, builtin)  # type: ignore[attr-defined]
    except (RuntimeError, OSError) as error:
        _log.debug("compiled hooks of %s are not cached: %s", owner.name, error)
    try:
        function.compile()
    except NumbaError as error:
        raise PolicyError(f"{owner.kind} {owner.name!r}: hook {hook!r} does not compile: {error}") from None
    return function


class _HookCache(DiskCache):
    """A cache keyed by everything that a hook's machine code depends on instead of one file's date."""

    def __init__(self, function: Any, digest: str, builtin: str | None) -> None:
        super().__init__(function)
        self._digest = digest
        self._builtin = builtin

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        load = partial(super().load_overload, sig, target_context)
        found = load()
        if found is not None or self._builtin is None or os.environ.get(_COMPILING):
            return found
        with _alone(Path(self.cache_path, f"{self._builtin}.lock")):
            found = load()  # another process may have compiled it meanwhile
            if found is None and _compile_elsewhere(self._builtin):
                found = load()
        return found

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (sig, codegen.magic_tuple(), self._digest)


def _builtin(owner: HookOwner) -> str | None:
    """Return the name by which another process finds a policy of this package; None of other owners."""
    is_ours = owner.kind == "policy" and type(owner).__module__.startswith("cache_policies.")
    return owner.name if is_ours else None


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Let processes that compile the same do so one after another: a minute at most, where files lock."""
    with ExitStack() as stack:
        with suppress(OSError):
            file = stack.enter_context(open(lock, "wb"))
            for _ in range(600):
                with suppress(BlockingIOError, PermissionError):
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, no fork keeps it
                    break
                time.sleep(0.1)
        yield


@cache
def _compile_elsewhere(policy: str) -> bool:
    """Fill the on-disk cache from another process, since the compiler takes and keeps some 100 MiB."""
    if not sys.executable:
        return False
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "cache_policies.compiled", policy]
    environment = {**os.environ, _COMPILING: "1", "PYTHONPATH": path}
    try:
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        _log.debug("%s is compiled in this process: %s", policy, error)
        return False
    return True


def _digest(parts: list[Any]) -> str:
    """Return the SHA-256 of strings and functions: code, defaults, all functions and numbers they reach."""
    sha, seen = hashlib.sha256(), set[int]()

    def add(value: Any) -> None:
        if isinstance(value, Dispatcher):
            sha.update(repr(sorted(value.targetoptions.items())).encode())
            value = value.py_func
        if isinstance(value, np.ndarray):
            sha.update(value.tobytes())
        elif not isinstance(value, pytypes.FunctionType):
            sha.update(repr(value).encode())
        elif id(value) not in seen:
            seen.add(id(value))
            add_code(value.__code__, value)

    def add_code(code: Any, function: Any) -> None:
        sha.update(code.co_code)
        for constant in code.co_consts:
            if isinstance(constant, pytypes.CodeType):
                add_code(constant, function)
            else:
                sha.update(repr(constant).encode())
        sha.update(repr((code.co_names, code.co_varnames, function.__defaults__)).encode())
        for cell in function.__closure__ or ():
            add(cell.cell_contents)
        for name in code.co_names:
            reached = function.__globals__.get(name)
            if isinstance(reached, pytypes.ModuleType):
                for attribute in code.co_names:
                    add_plain(vars(reached).get(attribute))
            else:
                add_plain(reached)

    def add_plain(value: Any) -> None:
        if value is not None and isinstance(  # which is slow for numba's class, and most are None
            value, (Dispatcher, pytypes.FunctionType, int, float, str, tuple, np.generic, np.ndarray)
        ):
            add(value)

    for part in parts:
        add(part)
    return sha.hexdigest()
