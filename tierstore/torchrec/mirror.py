"""Modules ``tierstore.torchrec.*`` are made of torchrec's modules of the same path when they are imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import torch

from tierstore.errors import ConfigError, MissingPackageError
from tierstore.torchrec.names import OURS, REFUSED

HERE, THEIRS = "tierstore.torchrec", "torchrec"


def install() -> ModuleType:
    """Let ``import tierstore.torchrec.a.b`` work from now on, and return torchrec.

    Raises MissingPackageError where torchrec cannot be imported.
    """
    try:
        theirs = import_module(THEIRS)
    except Exception as error:  # fbgemm's libraries of another torch fail with OSError
        raise MissingPackageError(
            f"tierstore.torchrec has the names of an installed torchrec, which cannot be imported: {error}. "
            "Install torchrec and fbgemm-gpu (or fbgemm-gpu-cpu) of the release that goes with torch "
            f"{torch.__version__}, or use tierstore's own modules, which need neither"
        ) from error
    if not any(isinstance(finder, Mirror) for finder in sys.meta_path):
        sys.meta_path.append(Mirror())
    return theirs


def mirrored(name: str) -> str:
    """Return the name of the module here that stands for torchrec's module ``name``."""
    return HERE + name.removeprefix(THEIRS)


def attribute(theirs: ModuleType, name: str) -> object:
    """Return what ``name`` of a module of torchrec is here.

    Raises AttributeError if torchrec has no such name, and ConfigError for a name that tiers cannot serve.
    """
    if name.startswith("__"):
        raise AttributeError(f"module {mirrored(theirs.__name__)!r} has no attribute {name!r}")
    value = getattr(theirs, name)
    if isinstance(value, ModuleType):
        inside = value.__name__ == THEIRS or value.__name__.startswith(f"{THEIRS}.")
        return import_module(mirrored(value.__name__)) if inside else value
    home = _home(value)
    if home in REFUSED:
        raise ConfigError(f"{mirrored(theirs.__name__)}.{name}: {REFUSED[home]}")
    if home not in OURS:
        return value
    module, _, ours = OURS[home].partition(":")
    return getattr(import_module(module), ours)


def _home(value: object) -> str:
    """Return where a class or function of torchrec is defined, in whichever module it was found."""
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"


def public_names(theirs: ModuleType) -> list[str]:
    """Return the names of a module of torchrec that ``import *`` gives, without those that are refused."""
    names = getattr(theirs, "__all__", [name for name in vars(theirs) if not name.startswith("_")])
    return [name for name in names if _home(getattr(theirs, name)) not in REFUSED]


class Mirror(MetaPathFinder, Loader):
    """Finds and makes the modules. Python's own finders come first, and find the files of this folder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{HERE}."):
            return None
        try:
            theirs = find_spec(THEIRS + fullname.removeprefix(HERE))
        except ModuleNotFoundError:  # a module of torchrec in the place of a package
            return None
        if theirs is None:
            return None
        is_package = theirs.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=theirs.origin, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        theirs = import_module(THEIRS + module.__name__.removeprefix(HERE))
        names = public_names(theirs)
        vars(module).update(
            __doc__=theirs.__doc__,
            __getattr__=partial(attribute, theirs),
            __dir__=lambda: [*vars(module), *names],
            __all__=names,
        )
