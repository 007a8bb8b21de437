"""The configuration of tables that are built without one: the user's, or that of environment variables."""

from __future__ import annotations

import os

from tierstore.config import TierConfig
from tierstore.errors import ConfigError

VARIABLES = {"hbm": "TIERSTORE_HBM", "uvm": "TIERSTORE_UVM", "ssd": "TIERSTORE_SSD", "path": "TIERSTORE_PATH"}
"""Environment variables by the fields of TierConfig that they give."""

_chosen: list[TierConfig] = []


def set_default_config(config: TierConfig | None) -> None:
    """Give all tables that are built without a ``config`` from now on this one; None takes it back.

    The configuration precedes the environment variables ``TIERSTORE_HBM``, ``TIERSTORE_UVM``,
    ``TIERSTORE_SSD`` and ``TIERSTORE_PATH``. Tables that exist stay as they are. Raises ConfigError for
    anything else.
    """
    if config is not None and not isinstance(config, TierConfig):
        raise ConfigError(f"config is {config!r}; give a tierstore.TierConfig, or None to have none")
    _chosen[:] = [] if config is None else [config]


def given_default() -> TierConfig | None:
    """Return what :func:`set_default_config` set, else what environment variables say, else None.

    Raises ConfigError, which names the variables, for values that a TierConfig cannot have.
    """
    if _chosen:
        return _chosen[0]
    # An empty variable is one that is not set, as everywhere in a shell.
    found = {field: value for field, name in VARIABLES.items() if (value := os.environ.get(name))}
    if not found:
        return None
    given: dict[str, str | list[str]] = dict(found)
    if "path" in found:
        given["path"] = found["path"].split(os.pathsep)
    try:
        return TierConfig(**given)  # type: ignore[arg-type]
    except ConfigError as error:
        names = ", ".join(VARIABLES[field] for field in found)
        raise ConfigError(f"environment variables {names}: {error}") from None


def default_config() -> TierConfig:
    """Return the configuration of tables that are built without one: ``TierConfig()`` if none is given."""
    return given_default() or TierConfig()
