"""MovieLens ratings in the order of time: will a user give a film 4 stars or more?

Reads the folder of ml-latest, ml-25m, ml-32m (ratings.csv, movies.csv), of ml-1m, ml-10m (ratings.dat,
movies.dat), or of an ml-NAME.inter with ml-NAME.item, as in the package recbole, whose ml-100k is used if no
path is given.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from tierstore.data.crossing import hashed_cross
from tierstore.data.dataset import Batch, TableInfo
from tierstore.data.disk_cache import Arrays, cached_arrays
from tierstore.data.recorded import TimeOrdered
from tierstore.errors import ConfigError, InputError
from tierstore.sparse import KeyedJaggedTensor

GOOD_RATING = 4.0
FORMAT = 1  # counts the changes of parse(): part of the cache's file name

_TABLES = ("user", "item", "weekday_hour", "decade", "genres", "user_decade", "item_weekday", "user_genres")
_RATINGS_AT_ONCE = 1 << 18
_HOUR, _DAY, _YEAR = 3600, 86_400, 365.2425 * 86_400
_TITLE_YEAR = re.compile(r"\((\d{4})\)\s*$")


@dataclass(frozen=True)
class Files:
    """ratings: user, item, rating and time separated by ``separator``; films: item, title, genres."""

    ratings: Path
    films: Path
    separator: str
    encoding: str

    @staticmethod
    def find(folder: Path) -> Files:
        if (folder / "ratings.csv").is_file():
            return Files(folder / "ratings.csv", folder / "movies.csv", ",", "utf-8")
        if (folder / "ratings.dat").is_file():
            return Files(folder / "ratings.dat", folder / "movies.dat", "::", "latin-1")
        for ratings in sorted(folder.glob("*.inter")):
            return Files(ratings, ratings.with_suffix(".item"), "\t", "utf-8")
        raise ConfigError(f"data 'movielens': {folder} has no ratings.csv, ratings.dat or *.inter")


@dataclass(frozen=True)
class MovieLensDataset(TimeOrdered):
    """Ids are made of these columns when a batch is drawn, so that memory is 13 bytes per rating.

    users, items: int32 (n,); times: int64 (n,), seconds. Per item: release year int32, 0 if unknown; genres
    of item i: genre_ids[genre_starts[i] : genre_starts[i + 1]].
    """

    users: np.ndarray
    items: np.ndarray
    times: np.ndarray
    years: np.ndarray
    genre_ids: np.ndarray
    genre_starts: np.ndarray

    dense_dim = 6

    def examples(self, first: int, end: int) -> Batch:
        users, items, times = self.users[first:end], self.items[first:end], self.times[first:end]
        rows = {table.name: table.num_embeddings for table in self.tables}
        years = self.years[items]
        decade = np.maximum(years - 1900, 0) // 10
        weekday = (times // _DAY + 3) % 7  # 1 January 1970 was a Thursday
        starts = self.genre_starts[items]
        genres_of = self.genre_starts[items + 1] - starts
        firsts = np.cumsum(genres_of) - genres_of
        genres = self.genre_ids[np.repeat(starts - firsts, genres_of) + np.arange(genres_of.sum())]
        columns = (
            users,
            items,
            weekday * 24 + times % _DAY // _HOUR,
            decade,
            genres,
            hashed_cross([users, decade], rows["user_decade"]),
            hashed_cross([items, weekday], rows["item_weekday"]),
            hashed_cross([np.repeat(users, genres_of), genres], rows["user_genres"]),
        )
        ones = np.ones_like(genres_of)
        lengths = [genres_of if name in ("genres", "user_genres") else ones for name in _TABLES]
        sparse = KeyedJaggedTensor(
            list(_TABLES),
            torch.from_numpy(np.concatenate(columns).astype(np.int64)),
            lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int64)),
            stride=end - first,
        )
        labels = torch.from_numpy(self.labels[first:end].astype(np.float32))
        return Batch(torch.from_numpy(_dense(times, years)), sparse, labels)


def load_movielens(path: str | None = None) -> MovieLensDataset:
    """Load the folder ``path``, or the ml-100k of an installed recbole."""
    files = Files.find(Path(path) if path else _installed_folder())
    sources = [files.ratings, *([files.films] if files.films.is_file() else [])]
    arrays = cached_arrays(f"movielens-{FORMAT}", sources, lambda: parse(files))
    users, items = int(arrays["users"].max()) + 1, int(arrays["items"].max()) + 1
    genres = max(1, int(arrays["genre_ids"].max(initial=0)) + 1)
    decades = max(0, int(arrays["years"].max()) - 1900) // 10 + 1
    rows = (users, items, 7 * 24, decades, genres, _bucket(users * 4), _bucket(items * 7), _bucket(users * 8))
    tables = tuple(TableInfo(name, n) for name, n in zip(_TABLES, rows, strict=True))
    return MovieLensDataset("movielens", tables, **arrays)


def _installed_folder() -> Path:
    spec = find_spec("recbole")  # importing it would import many packages
    folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    if folder is None or not (folder / "dataset_example" / "ml-100k").is_dir():
        raise ConfigError(
            "data 'movielens' needs the folder of a MovieLens dataset (from grouplens.org) as path, or the "
            "package recbole, which has ml-100k"
        )
    return folder / "dataset_example" / "ml-100k"


def _bucket(rows: int) -> int:
    """Return the power of two at or above ``rows``, at most 2^24."""
    return min(1 << 24, 1 << max(0, rows - 1).bit_length())


def _dense(times: np.ndarray, years: np.ndarray) -> np.ndarray:
    """Return float32 (n, 6): time of day and of year as waves, year of the rating, age of the film."""
    day, year = 2 * np.pi * (times % _DAY) / _DAY, 2 * np.pi * (times % _YEAR) / _YEAR
    now = 1970 + times / _YEAR
    age = np.where(years > 0, np.log1p(np.maximum(now - years, 0)), 0)
    waves = [np.sin(day), np.cos(day), np.sin(year), np.cos(year)]
    return np.stack([*waves, (now - 2005) / 10, age - 2], axis=1).astype(np.float32)


def parse(files: Files) -> Arrays:
    """Return the columns of MovieLensDataset in the order of time; users and items are numbered from 0."""
    parts = list(_ratings(files))
    if not parts:
        raise InputError(f"{files.ratings} has no ratings")
    users, items, times = (np.concatenate([part[k] for part in parts]) for k in (0, 1, 3))
    labels = np.concatenate([part[2] for part in parts]) >= GOOD_RATING
    order = np.argsort(times, kind="stable")
    item_names, items = np.unique(items[order], return_inverse=True)
    years, genre_ids, genre_starts = _films(files, item_names)
    return {
        "labels": labels[order].astype(np.uint8),
        "users": np.unique(users[order], return_inverse=True)[1].astype(np.int32),
        "items": items.astype(np.int32),
        "times": times[order],
        "years": years,
        "genre_ids": genre_ids,
        "genre_starts": genre_starts,
    }


def _ratings(files: Files) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield users and items int32, ratings float32, times int64, some lines at a time."""
    has_header = files.separator != "::"
    separator = "\t" if files.separator == "::" else files.separator
    with open(files.ratings, encoding=files.encoding) as text:
        if has_header:
            next(text, "")
        lines = (line.replace("::", "\t") for line in text) if files.separator == "::" else text
        first = 1 + has_header
        while part := list(islice(lines, _RATINGS_AT_ONCE)):
            try:
                table = np.loadtxt(part, delimiter=separator, usecols=(0, 1, 2, 3), ndmin=2, dtype=np.float64)
            except ValueError as error:  # numpy names the row among these lines
                raise InputError(f"{files.ratings}, from line {first} on: {error}") from error
            first += len(part)
            user, item, rating, seconds = table.T
            yield (
                user.astype(np.int32),
                item.astype(np.int32),
                rating.astype(np.float32),
                seconds.astype(np.int64),
            )


def _films(files: Files, item_names: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the release year per item, ids of genres, and where the genres of each item start."""
    place = {int(name): k for k, name in enumerate(item_names)}
    years = np.zeros(len(item_names), dtype=np.int32)
    genres: list[list[int]] = [[] for _ in item_names]
    codes: dict[str, int] = {}
    for number, (name, year, genre_names) in enumerate(_film_lines(files), start=1):
        if not name.isdigit():
            raise InputError(f"{files.films}, film {number}: {name!r} is not the number of a film")
        k = place.get(int(name))
        if k is not None:
            years[k] = int(year) if year.isdigit() else 0
            genres[k] = [codes.setdefault(genre, len(codes)) for genre in genre_names if genre]
    starts = np.zeros(len(genres) + 1, dtype=np.int64)
    np.cumsum([len(of_item) for of_item in genres], out=starts[1:])
    return years, np.array([code for of_item in genres for code in of_item], dtype=np.int32), starts


def _film_lines(files: Files) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (item, release year, genres) of each film; nothing if there is no such file."""
    if not files.films.is_file():
        return
    with open(files.films, encoding=files.encoding, newline="") as text:
        if files.separator == "\t":
            rows = csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
            next(rows, None)
            for row in rows:
                item, _, year, genres = [*row, "", "", "", ""][:4]
                yield item, year, genres.split(" ")
            return
        lines = (
            (line.rstrip("\r\n").split("::") for line in text)
            if files.separator == "::"
            else csv.reader(text)
        )
        if files.separator == ",":
            next(lines, None)
        for row in lines:
            item, title, genres = [*row, "", "", ""][:3]
            year_at = _TITLE_YEAR.search(title)
            yield item, year_at.group(1) if year_at else "", genres.split("|")
