"""Imports a framework, or says what to install."""

from __future__ import annotations

from importlib import import_module

from tierstore.errors import MissingPackageError


def need(package: str) -> None:
    """Raise MissingPackageError that says what to install if ``package`` cannot be imported."""
    try:
        import_module(package)
    except Exception as error:  # one that does not fit this torch may raise anything
        raise MissingPackageError(
            f"tierstore.integrations.{package} needs {package}, which cannot be imported: {error}. Install "
            f"it by `pip install {package}`; tierstore itself does not need it"
        ) from error
