"""A store that is as full as promised is overwritten, committed and reopened without an end.

Past that it says what holds the space, and goes on when space is given."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from tests.density import thinned
from tests.in_memory import tmp_path as in_memory  # noqa: F401  (a fixture)
from tierstore.errors import StoreFullError
from tierstore.keys import make_keys
from tierstore.store import StoredTable
from tierstore.store.native import NativeConfig, NativeStore

ROUNDS = 40
FULL = 0.75
FULL_OF_SMALLEST, FULL_IN_SMALL_CAP = 0.65, 2 / 3
FULL_WITH_KEPT, FULL_WITH_TAGS = 0.45, 0.33
"""With ``keep`` of 2 or 3, and with one tag besides: docs/explanation/native_store.md promises these."""


def rows_of(ids: np.ndarray, versions: np.ndarray, row_bytes: int) -> np.ndarray:
    rows = np.zeros((len(ids), row_bytes // 8), np.uint64)
    rows[:, 0] = versions
    rows[:, -1] = ids * 1_000_003 + versions
    return rows.view(np.uint8)


class Training:
    """Tables of ``count`` rows each beside the version of every row."""

    def __init__(
        self,
        path,
        sizes: list[int],
        count: int,
        full: float = FULL,
        keep: int = 1,
        footer: int = 0,
        any_ids: bool = False,
    ) -> None:
        self.tables = [StoredTable(f"t{i}", i, 1 << 48, size // 4, size) for i, size in enumerate(sizes)]
        some = np.unique(np.random.default_rng(7).integers(0, 1 << 48, 2 * count))
        self.ids = np.random.default_rng(8).permutation(some)[:count] if any_ids else np.arange(count)
        self.path, self.sizes, self.count = path, sizes, count
        self.cap = int(count * sum(size + 16 + footer for size in sizes) / full)
        self.keep = keep
        self.versions = np.zeros((len(sizes), count), np.int64)
        self.store = self.open()

    def open(self) -> NativeStore:
        return NativeStore(self.path, self.tables, config=NativeConfig(self.cap, keep=self.keep))

    def write(self, table: int, ids: np.ndarray, version: int) -> None:
        for first in range(0, len(ids), 1000):
            some = ids[first : first + 1000]
            self.versions[table, some] = version
            self.store.write(
                make_keys(table, self.ids[some]), rows_of(some, self.versions[table, some], self.sizes[table])
            )

    def check(self) -> None:
        ids = np.arange(self.count)
        for table, size in enumerate(self.sizes):
            out = np.zeros((self.count, size), np.uint8)
            assert self.store.read(make_keys(table, self.ids), out).all()
            assert np.array_equal(out, rows_of(ids, self.versions[table], size))

    def rounds(self, share: float, skewed: bool = False, tag_every: int = 0) -> None:
        """Overwrite a ``share`` of all rows and commit, ROUNDS times. Every fifth time reopen the store.

        A tag takes the place of the tag before.
        """
        rng = np.random.default_rng(1)
        tagged = 0
        for version in range(1, ROUNDS + 1):
            for table in range(len(self.sizes)):
                changed = int(share * self.count)
                if skewed:
                    ids = np.unique(rng.zipf(1.2, 4 * changed) % self.count)[:changed]
                else:
                    ids = rng.choice(self.count, changed, replace=False)
                self.write(table, ids, version)
            tags = tag_every > 0 and version % tag_every == 0
            number = self.store.commit(b"%d" % version, f"t{version}" if tags else None)
            if tags:
                if tagged:
                    self.store.drop_commit(tagged)
                tagged = number
            if version % 5 == 0:
                self.store.close()
                self.store = self.open()
                assert self.store.meta() == b"%d" % version

    def begin(self) -> None:
        for table in range(len(self.sizes)):
            self.write(table, np.arange(self.count), 0)
        self.store.commit(b"0")


SETTINGS = [
    ([272], 0.01),
    ([272], 0.02),
    ([272], 0.03),
    ([272], 0.05),
    ([2064], 0.05),
    ([48, 240, 528], 0.05),
]


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(("sizes", "share"), SETTINGS)
def test_rounds_at_three_quarters(tmp_path, sizes, share, skewed):
    training = Training(tmp_path, sizes, 20_000)
    training.begin()
    training.rounds(share, skewed)
    training.check()
    training.store.close()


OF_SMALL_ROWS = itertools.product([16, 32, 48, 64, 80, 96, 112, 128], [0.01, 0.02, 0.03, 0.05], [False, True])


@pytest.mark.parametrize(("size", "share", "any_ids"), thinned(OF_SMALL_ROWS, 3))
def test_rounds_of_small_rows(in_memory, size, share, any_ids):  # noqa: F811
    """In a cap of 8 MiB; in smaller caps less may be full. Footers are largest where ids have 48 bits."""
    full = FULL if size >= 64 else FULL_OF_SMALLEST
    training = Training(in_memory, [size], int(full * (8 << 20) / (size + 16)) + 1, full, any_ids=any_ids)
    assert training.cap >> 20 == 8
    training.begin()
    training.rounds(share)
    training.check()
    training.store.close()


@pytest.mark.parametrize("share", [0.01, 0.05])
@pytest.mark.parametrize("size", [16, 32, 48, 64, 80, 112])
def test_rounds_of_small_rows_in_a_small_cap(tmp_path, size, share):
    """Of a row and 12 bytes for its part of a footer two thirds of the cap may be full."""
    training = Training(tmp_path, [size], 40_001, FULL_IN_SMALL_CAP, footer=12)
    training.begin()
    training.rounds(share)
    training.check()
    training.store.close()


WITH_OLDER_COMMITS = itertools.product([(2, 0), (3, 0), (1, 10), (2, 10), (3, 10)], SETTINGS, [False, True])


@pytest.mark.parametrize(("kept", "setting", "skewed"), thinned(WITH_OLDER_COMMITS, 7))
def test_rounds_with_older_commits(in_memory, kept, setting, skewed):  # noqa: F811
    """In memory, unlike the tests above: these would wait minutes for a disk that syncs."""
    (keep, tag_every), (sizes, share) = kept, setting
    full = FULL_WITH_TAGS if tag_every else FULL_WITH_KEPT
    training = Training(in_memory, sizes, 20_000, full, keep)
    training.begin()
    training.rounds(share, skewed, tag_every)
    assert len(training.store.commits()) == keep  # the newest has the tag
    training.check()
    training.store.close()


class TestPastThePromise:
    """Every row is overwritten again and again beside two older commits, one of which has a tag."""

    @pytest.fixture
    def training(self, tmp_path):
        training = Training(tmp_path, [272], 20_000, keep=2)
        training.begin()
        training.write(0, np.arange(2000), 1)
        training.store.commit(b"1", "best")
        training.write(0, np.arange(2000, 3000), 1)
        training.store.commit(b"2")
        training.write(0, np.arange(3000, 4000), 1)
        training.store.commit(b"3")
        assert [commit.id for commit in training.store.commits()] == [2, 3, 4]
        yield training
        training.store.close()

    def overwrite(self, training: Training) -> tuple[int, str]:
        """Overwrite 100 rows at a time until the store is full.

        Return the first row of the call that failed, and the error. Any of that call's rows may be written.
        """
        for first in range(0, training.count, 100):
            before = training.versions.copy()
            try:
                training.write(0, np.arange(first, first + 100), 2)
            except StoreFullError as error:
                training.versions = before
                return first, str(error)
        raise AssertionError("never full")

    def go_on(self, training: Training, first: int) -> None:
        """What failed goes through now, nothing is lost, and a reopening finds all of it."""
        training.write(0, np.arange(first, first + 100), 2)
        training.store.commit(b"went on")
        training.check()
        training.store.close()
        training.store = training.open()
        assert training.store.meta() == b"went on"
        training.check()

    def test_the_error_names_the_commits_and_what_dropping_them_gives(self, training):
        _, text = self.overwrite(training)
        assert re.search(
            r"Older commits keep [\d.]+ [KM]iB of superseded rows: drop \(drop_commit\) "
            r"commit 2 \(tag 'best'\) for [\d.]+ [KM]?i?B, then commit 3 for [\d.]+ [KM]?i?B\. "
            r"To go on raise the cap by at least \d+ bytes, to \d+, here",
            text,
        ), text

    def test_what_was_written_can_be_committed(self, training):
        first, _ = self.overwrite(training)
        training.store.commit(b"saved")
        training.store.close()
        training.store = training.open()
        assert training.store.meta() == b"saved"
        for ids in (np.arange(first), np.arange(first + 100, training.count)):
            out = np.zeros((len(ids), 272), np.uint8)
            assert training.store.read(make_keys(0, ids), out).all()
            assert np.array_equal(out, rows_of(ids, training.versions[0, ids], 272))

    def test_dropping_them_lets_it_go_on(self, training):
        first, _ = self.overwrite(training)
        for number in (2, 3):
            training.store.drop_commit(number)
        self.go_on(training, first)

    def test_the_cap_that_it_names_lets_it_go_on(self, training):
        first, text = self.overwrite(training)
        training.cap = int(text.split("bytes, to ")[1].split(",")[0])
        training.store.set_cap(training.cap)
        self.go_on(training, first)


def test_what_was_written_before_a_store_was_full_can_be_committed(tmp_path):
    """And with the room that the error asks for the same call goes through."""
    training = Training(tmp_path, [272], 20_000)
    training.write(0, np.arange(training.count), 0)
    training.store.commit(b"0")
    written = 0

    def fill() -> None:
        nonlocal written
        for written in range(0, training.count, 100):
            training.write(0, np.arange(written, written + 100), 1)

    with pytest.raises(StoreFullError, match="raise the cap by at least") as full:
        fill()
    training.store.commit(b"saved")
    training.versions[0, written:] = 0
    needed = int(str(full.value).split("bytes, to ")[1].split(",")[0])
    assert training.cap < needed < 2 * training.cap
    training.store.close()
    training.cap = 2 * needed
    training.store = training.open()
    assert training.store.meta() == b"saved"
    training.write(0, np.arange(written, training.count), 2)
    training.store.commit(b"went on")
    training.check()
    training.store.close()
