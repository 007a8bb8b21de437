"""The Python parsers of what lies on disk, fed with mutations: a named error, or what was written."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.store_model import TABLES, put
from tierstore.errors import StoreCorruptError, StoreMismatchError
from tierstore.store import CommitInfo, open_store, read_identity
from tierstore.store.commits import new_commit, pack_commit, read_commit, unpack_commit
from tierstore.store.files import json_with_checksum
from tierstore.store.portable import FILE_NAME, read_description

NAMED = (StoreCorruptError, StoreMismatchError)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def places_of(content, path=()):
    """Paths to all values of a JSON document."""
    yield path
    if isinstance(content, (dict, list)):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in items:
            yield from places_of(value, (*path, key))


def put_at(content, path, value):
    """``content`` with another value at ``path``."""
    if not path:
        return value
    copy = dict(content) if isinstance(content, dict) else list(content)
    copy[path[0]] = put_at(content[path[0]], path[1:], value)
    return copy


def as_file(content, checked: bool) -> bytes:
    """As JSON, with the checksum that its author would give it if ``checked``."""
    try:
        if checked and isinstance(content, dict):
            return json_with_checksum({k: v for k, v in content.items() if k != "crc32"})
        return json.dumps(content).encode()
    except ValueError:  # NaN and infinity
        return json.dumps(content).encode()


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    with open_store(folder / "store", "memory", TABLES[:2], 1 << 20) as store:
        put(store, 1, range(3))
        store.commit(b"meta", tag="tag")
        store.export(folder / "export")
    return folder


@pytest.mark.parametrize(("name", "read"), [("TIERSTORE.json", read_identity), (FILE_NAME, read_description)])
def test_json_files(written, name, read):
    source = written / ("store" if name == "TIERSTORE.json" else "export")
    whole = json.loads((source / name).read_bytes())
    places = list(places_of(whole))

    @settings(max_examples=400, deadline=None)
    @given(place=st.sampled_from(places), value=JSON, checked=st.booleans())
    def change_a_value(place, value, checked):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, name).write_bytes(as_file(put_at(whole, place, value), checked))
            with suppress(*NAMED):
                read(Path(folder))

    @settings(max_examples=200, deadline=None)
    @given(data=st.binary(max_size=200))
    def anything(data):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, name).write_bytes(data)
            with pytest.raises(NAMED):
                read(Path(folder))

    change_a_value()
    anything()


@settings(max_examples=300, deadline=None)
@given(
    tag=st.text(max_size=10),
    meta=st.binary(max_size=40),
    places=st.lists(st.integers(0, 79), max_size=3),
    data=st.data(),
)
def test_commit_records(tag, meta, places, data):
    commit = CommitInfo(7, tag.encode("utf-8", "ignore").decode(), 5, meta)
    record = pack_commit(commit)
    assert unpack_commit(record + b"more", "x") == (commit, len(record))
    damaged = bytearray(record)
    for place in places:
        damaged[place % len(record)] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(record)))]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "record")
        file.write_bytes(damaged)
        if bytes(damaged) == record:
            assert read_commit(file) == commit
            return
        with pytest.raises(StoreCorruptError):
            read_commit(file)


def test_records_of_huge_lengths(tmp_path):
    record = bytearray(pack_commit(new_commit(1, "tag", b"meta")))
    record[24:32] = b"\xff" * 8
    (tmp_path / "record").write_bytes(record)
    with pytest.raises(StoreCorruptError):
        read_commit(tmp_path / "record")
