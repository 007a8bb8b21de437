"""torchrec's modules and names, with tables in tiers.

A script of torchrec uses it after ``sed 's/\\btorchrec\\b/tierstore.torchrec/'``: ``tierstore.torchrec.a.b``
has the names of ``torchrec.a.b``. What tiers change is tierstore's, with torchrec's names and arguments
(``names.OURS``); everything else is the installed torchrec's own. Names whose rows would stay out of the
tiers raise ConfigError (``names.REFUSED``). Files of this folder have no name that torchrec has.
"""

from __future__ import annotations

from tierstore.torchrec.mirror import attribute, install, public_names

_theirs = install()


def __getattr__(name: str) -> object:
    return attribute(_theirs, name)


def __dir__() -> list[str]:
    return [*globals(), *public_names(_theirs)]
