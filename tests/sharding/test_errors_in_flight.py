"""Which error a ``finally`` or ``except`` runs because of."""

from __future__ import annotations

from tierstore.sharding.peers import in_flight


def test_errors_in_flight() -> None:
    found = [in_flight()]
    try:
        raise ValueError("outer")
    except ValueError:
        before = in_flight()
        found += [before, in_flight(before)]
        try:
            raise KeyError("inner")
        except KeyError:
            found.append(in_flight(before))
        found.append(in_flight(before))
    found.append(in_flight())
    kinds = [None if error is None else type(error).__name__ for error in found]
    assert kinds == [None, "ValueError", None, "KeyError", None, None]
