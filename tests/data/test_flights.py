from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from tierstore.data import load
from tierstore.data.disk_cache import cache_directory
from tierstore.errors import ConfigError, InputError

FLIGHT_COLUMNS = [
    *(
        "year",
        "month",
        "day",
        "dep_time",
        "sched_dep_time",
        "dep_delay",
        "arr_time",
        "sched_arr_time",
        "arr_delay",
    ),
    *(
        "carrier",
        "flight",
        "tailnum",
        "origin",
        "dest",
        "air_time",
        "distance",
        "hour",
        "minute",
        "time_hour",
    ),
]
WEATHER_COLUMNS = [
    *(
        "origin",
        "year",
        "month",
        "day",
        "hour",
        "temp",
        "dewp",
        "humid",
        "wind_dir",
        "wind_speed",
        "wind_gust",
    ),
    *("precip", "pressure", "visib", "time_hour"),
]


@pytest.fixture(scope="module")
def flights(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield load("flights")


def flight(day: int, clock: int, delay: str, tail: str = "N1", **other: str) -> dict[str, str]:
    row = dict.fromkeys(FLIGHT_COLUMNS, "1")
    row |= {
        "year": "2013",
        "month": "1",
        "day": str(day),
        "sched_dep_time": str(clock),
        "sched_arr_time": "1200",
    }
    return (
        row | {"arr_delay": delay, "tailnum": tail, "carrier": "UA", "origin": "JFK", "dest": "LAX"} | other
    )


def weather(hour: int, temp: str, origin: str = "JFK") -> dict[str, str]:
    row = dict.fromkeys(WEATHER_COLUMNS, "0") | {"year": "2013", "month": "1", "day": "1", "hour": str(hour)}
    return row | {"origin": origin, "temp": temp, "wind_gust": "NA", "pressure": "NA"}


def write(folder: Path, flights: list[dict[str, str]], weathers: list[dict[str, str]]) -> Path:
    for name, columns, rows in (
        ("flights.csv", FLIGHT_COLUMNS, flights),
        ("weather.csv", WEATHER_COLUMNS, weathers),
    ):
        with open(folder / name, "w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    return folder


@pytest.fixture
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_shape_of_the_demo(flights):
    assert flights.num_train + flights.num_test == 327_346  # flights that arrived
    assert flights.num_train == int(327_346 * 0.9)
    assert len(flights.tables) == 21
    touched = sum(len(np.unique(column)) for column in flights.ids)
    assert 10**5 < touched < 10**6
    for column, table in zip(flights.ids, flights.tables, strict=True):
        assert 0 <= column.min() <= column.max() < table.num_embeddings
    assert flights.labels.mean() == pytest.approx(0.237, abs=0.001)
    assert np.isfinite(flights.dense).all()
    assert np.abs(flights.dense.astype(np.float32)).max() < 12


def test_batches_cover_the_examples_in_order(flights):
    batches = list(flights.train(100_000))
    assert [len(batch) for batch in batches] == [100_000, 100_000, flights.num_train - 200_000]
    values = torch.cat([batch.sparse["tailnum_flight"].values() for batch in batches])
    column = [table.name for table in flights.tables].index("tailnum_flight")
    assert np.array_equal(values.numpy(), flights.ids[column][: flights.num_train])
    assert sum(len(batch) for batch in flights.test(10_000)) == flights.num_test
    first = next(flights.test(1000))
    assert np.array_equal(first.labels.numpy(), flights.labels[flights.num_train :][:1000])
    assert first.dense.dtype == torch.float32
    assert first.dense.shape == (1000, flights.dense_dim)


def test_start_batch_resumes_across_epochs(flights):
    whole = list(flights.train(50_000, epochs=2))
    rest = list(flights.train(50_000, epochs=2, start_batch=4))
    assert len(rest) == len(whole) - 4
    for a, b in zip(whole[4:], rest, strict=True):
        assert torch.equal(a.sparse.values(), b.sparse.values())
        assert torch.equal(a.labels, b.labels)


def test_cancelled_flights_leave_and_time_orders(tmp_path, cache_home):
    rows = [
        flight(2, 600, "20", tail="late"),
        flight(1, 700, "NA"),
        flight(1, 2400, "15", tail="midnight"),
        flight(1, 900, "16", tail="one"),
        flight(1, 30, "-4", tail="early"),
    ]
    data = load("flights", path=str(write(tmp_path, rows, [weather(0, "50")])))
    assert data.labels.tolist() == [0, 0, 1, 1]  # 2400 is the same day's first minute
    tails = data.ids[[table.name for table in data.tables].index("tailnum")]
    assert tails.tolist() == [2, 0, 3, 1]  # midnight, early, one, late by name


def test_weather_is_that_of_an_earlier_hour(tmp_path, cache_home):
    rows = [flight(1, 610, "0"), flight(1, 710, "0"), flight(1, 1010, "0"), flight(1, 1110, "0")]
    data = load("flights", path=str(write(tmp_path, rows, [weather(6, "95"), weather(10, "75")])))
    temperature = data.dense[:, 11].astype(float)
    assert temperature == pytest.approx([0.0, 2.0, 2.0, 1.0], abs=1e-3)  # unknown, 6h, 6h carried, 10h


def test_nothing_known_only_after_departure_is_a_feature(tmp_path, cache_home):
    before = [flight(1, 600, "0"), flight(1, 700, "40")]
    after = [row | dict.fromkeys(("dep_time", "dep_delay", "arr_time", "air_time"), "999") for row in before]
    folders = [tmp_path / "a", tmp_path / "b"]
    data = []
    for folder, rows in zip(folders, (before, after), strict=True):
        folder.mkdir()
        data.append(load("flights", path=str(write(folder, rows, [weather(0, "50")]))))
    assert np.array_equal(data[0].ids, data[1].ids)
    assert np.array_equal(data[0].dense, data[1].dense)


def test_cache_is_used_and_survives_damage(tmp_path, cache_home):
    folder = write(tmp_path, [flight(1, 600, "0"), flight(1, 700, "40")], [weather(0, "50")])
    first = load("flights", path=str(folder))
    (stored,) = cache_directory().iterdir()
    assert stored.is_relative_to(cache_home)
    again = load("flights", path=str(folder))
    assert np.array_equal(first.ids, again.ids)
    stored.write_bytes(stored.read_bytes()[:100])
    assert np.array_equal(load("flights", path=str(folder)).ids, first.ids)
    write(tmp_path, [flight(1, 600, "0")], [weather(0, "50")])  # other data, not the cached
    assert len(load("flights", path=str(folder)).labels) == 1


def test_unwritable_cache_is_no_error(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    folder = write(tmp_path, [flight(1, 600, "0")], [weather(0, "50")])
    assert len(load("flights", path=str(folder)).labels) == 1


def test_bad_files_are_named(tmp_path, cache_home):
    with pytest.raises(ConfigError, match=r"no flights\.csv\.zip or flights\.csv"):
        load("flights", path=str(tmp_path))
    folder = write(tmp_path, [flight(1, 600, "0", distance="far")], [weather(0, "50")])
    with pytest.raises(InputError, match=r"flights\.csv.*far"):
        load("flights", path=str(folder))
    (folder / "flights.csv").write_text("year,month\n2013,1\n")
    with pytest.raises(InputError, match="has no column"):
        load("flights", path=str(folder))
