"""Recording: what comes back is what was looked up, in full or of a spatial sample."""

from __future__ import annotations

import json
import zipfile

import numpy as np
import pytest
import torch

from cache_policies import simulate
from tierstore import data
from tierstore.errors import ClosedError, InputError
from tierstore.sparse import KeyedJaggedTensor
from tierstore.trace import TraceRecorder, from_dataset, open_trace, recorded


def batches_of(trace):
    return [[(table, ids.tolist()) for table, ids in segments] for segments in trace.batches()]


def test_batches_come_back(tmp_path):
    path = tmp_path / "t.npz"
    with TraceRecorder(path, {"a": 100, "b": 0}) as recorder:
        recorder.record({"a": np.array([3, 1, 3]), "b": np.array([[2**40], [0]])})
        recorder.record({"b": np.empty(0, np.int64)})
        recorder.record({"a": torch.tensor([7], dtype=torch.int32)})
    trace = open_trace(path)
    assert batches_of(trace) == [[(0, [3, 1, 3]), (1, [2**40, 0])], [], [(0, [7])]]
    assert (trace.tables, trace.num_embeddings, trace.num_batches) == (("a", "b"), (100, 0), 3)
    assert len(list(trace.key_batches())) == 3  # empty batches count too


def test_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "_CHUNK_IDS", 1000)
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 1000, 370) for _ in range(20)]
    sizes = {}
    for compress in (False, True):
        path = tmp_path / f"{compress}.npz"
        with TraceRecorder(path, {"a": 1000}, compress=compress) as recorder:
            for batch in batches:
                recorder.record({"a": batch})
        for batch, keys in zip(batches, open_trace(path).key_batches(), strict=True):
            np.testing.assert_array_equal(batch, keys)
        sizes[compress] = path.stat().st_size
    assert sizes[True] < 0.7 * sizes[False]


def test_watching_a_loader_changes_nothing(tmp_path):
    dataset = data.load("synthetic:zipf:1.1", tables=3, rows=400, pooling_factor=2.0)
    names = {table.name: table.num_embeddings for table in dataset.tables}
    loader = [batch for batch, _ in zip(dataset.train(50), range(5), strict=False)]
    with TraceRecorder(tmp_path / "t.npz", names) as recorder:
        assert list(recorder.watch(loader)) == loader
    whole = from_dataset(dataset, 50)
    for kept, keys in zip(open_trace(tmp_path / "t.npz").key_batches(), whole.key_batches(), strict=False):
        np.testing.assert_array_equal(kept, keys)


def test_bare_features_can_be_watched(tmp_path):
    features = KeyedJaggedTensor(["a"], torch.tensor([4, 4, 9]), lengths=torch.tensor([2, 1]))
    with TraceRecorder(tmp_path / "t.npz", {"a": 10}) as recorder:
        list(recorder.watch([features]))
    assert batches_of(open_trace(tmp_path / "t.npz")) == [[(0, [4, 4, 9])]]


def test_samples_keep_all_uses_of_some_rows(tmp_path):
    rng = np.random.default_rng(1)
    batches = [(20_000 * rng.random(4000) ** 3).astype(np.int64) for _ in range(30)]
    with TraceRecorder(tmp_path / "t.npz", {"a": 20_000}, rate=0.25) as recorder:
        for batch in batches:
            recorder.record({"a": batch})
    trace = open_trace(tmp_path / "t.npz")
    assert trace.rate == 0.25
    kept = list(trace.key_batches())
    rows = np.unique(np.concatenate(kept))
    assert 0.2 < rows.size / np.unique(np.concatenate(batches)).size < 0.3
    for batch, keys in zip(batches, kept, strict=True):
        np.testing.assert_array_equal(batch[np.isin(batch, rows)], keys)
    whole, part = simulate(batches, "lru", 4000), simulate(kept, "lru", 1000)
    assert part.misses / 0.25 == pytest.approx(whole.misses, rel=0.06)


def test_bad_records(tmp_path):
    recorder = TraceRecorder(tmp_path / "t.npz", {"a": 10})
    with pytest.raises(InputError, match="unknown tables"):
        recorder.record({"b": np.arange(3)})
    recorder.close()
    recorder.close()
    with pytest.raises(ClosedError):
        recorder.record({"a": np.arange(3)})
    assert list(open_trace(tmp_path / "t.npz").key_batches()) == []


@pytest.mark.parametrize(("tables", "rate"), [({"a": 1}, 0), ({"a": 1}, 1.5), ({}, 1)])
def test_bad_recorders(tmp_path, tables, rate):
    with pytest.raises(InputError):
        TraceRecorder(tmp_path / "t.npz", tables, rate)


def test_errors_of_the_writing_thread_surface(tmp_path):
    recorder = TraceRecorder(tmp_path / "t.npz", {"a": 10})

    def full(*_):
        raise OSError(28, "No space left on device")

    recorder._append = full
    recorder.record({"a": np.arange(3)})
    with pytest.raises(OSError, match="No space left"):
        recorder.close()


def rewrite(path, change):
    """The members of a recording, changed."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def newer(members):
    members[recorded.HEADER] = json.dumps({"version": 9, "tables": {"a": 1}, "rate": 1}).encode()


def other_tables(members):
    members[recorded.HEADER] = json.dumps({"version": 1, "tables": {"a": 1, "b": 1}, "rate": 1}).encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (newer, "trace format 9"),
        (other_tables, "do not fit 2 tables"),
        (lambda m: m.pop("ids/0.npy"), "chunk 0 is damaged"),
        (lambda m: m.update({"ids/0.npy": m["ids/0.npy"][:-5]}), "chunk 0 is damaged"),
        (lambda m: m.update({recorded.HEADER: b"{}"}), "no complete recorded trace"),
    ],
)
def test_damaged_recordings_are_refused(tmp_path, change, message):
    path = tmp_path / "t.npz"
    with TraceRecorder(path, {"a": 100}) as recorder:
        recorder.record({"a": np.arange(9)})
    rewrite(path, change)
    with pytest.raises(InputError, match=message):
        list(open_trace(path).key_batches())
