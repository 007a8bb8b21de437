from __future__ import annotations

import numpy as np
import pytest
import torch

from tierstore.data import load, movielens
from tierstore.errors import ConfigError, InputError

# user, item, rating, time: out of order on purpose; film 30 is in no list of films
RATINGS = [(7, 20, 4.0, 3000), (5, 10, 3.5, 1000), (7, 10, 5.0, 2000), (5, 30, 1.0, 4000)]
FILMS = [
    (10, "Toy Story", 1995, ["Animation", "Comedy"]),
    (20, "Alien, the", 1979, ["Horror"]),
    (99, "Unseen", 2000, []),
]


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_csv(folder) -> None:
    rows = [f"{u},{i},{r},{t}" for u, i, r, t in RATINGS]
    (folder / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *rows]) + "\n")
    films = [f'{i},"{title} ({year})",{"|".join(genres)}' for i, title, year, genres in FILMS]
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *films]) + "\n")


def write_dat(folder) -> None:
    (folder / "ratings.dat").write_text("".join(f"{u}::{i}::{r}::{t}\n" for u, i, r, t in RATINGS))
    films = [f"{i}::{title} ({year})::{'|'.join(genres)}" for i, title, year, genres in FILMS]
    (folder / "movies.dat").write_text("\n".join(films) + "\n", encoding="latin-1")


def write_inter(folder) -> None:
    rows = [f"{u}\t{i}\t{r}\t{t}" for u, i, r, t in RATINGS]
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
    (folder / "ml-x.inter").write_text("\n".join([header, *rows]) + "\n")
    films = [f"{i}\t{title}\t{year}\t{' '.join(genres)}" for i, title, year, genres in FILMS]
    header = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"
    (folder / "ml-x.item").write_text("\n".join([header, *films]) + "\n")


@pytest.mark.parametrize("write", [write_csv, write_dat, write_inter])
def test_formats(tmp_path, write):
    write(tmp_path)
    data = load("movielens", path=str(tmp_path))
    assert (data.num_train, data.num_test) == (3, 1)
    batch = data.examples(0, 4)
    assert batch.labels.tolist() == [0, 1, 1, 0]
    assert batch.sparse["user"].values().tolist() == [0, 1, 1, 0]
    assert batch.sparse["item"].values().tolist() == [0, 0, 1, 2]
    assert batch.sparse["decade"].values().tolist() == [9, 9, 7, 0]
    assert batch.sparse["genres"].lengths().tolist() == [2, 2, 1, 0]
    assert batch.sparse["genres"].values().tolist() == [0, 1, 0, 1, 2]
    assert batch.sparse["user_genres"].lengths().tolist() == [2, 2, 1, 0]
    assert batch.dense.shape == (4, data.dense_dim)
    assert batch.dense.isfinite().all()
    rows = {table.name: table.num_embeddings for table in data.tables}
    assert (rows["user"], rows["item"], rows["genres"]) == (2, 3, 3)


def test_batches_do_not_depend_on_their_borders(tmp_path):
    rng = np.random.default_rng(5)
    lines = [
        f"{rng.integers(1, 40)},{rng.integers(1, 60)},{rng.integers(1, 6)},{10**9 + 7000 * k}"
        for k in range(500)
    ]
    (tmp_path / "ratings.csv").write_text("\n".join(["header", *lines]))
    films = [f"{i},Film {i} ({1900 + 2 * i}),{'|'.join(['a', 'b', 'c'][: i % 4])}" for i in range(1, 60)]
    (tmp_path / "movies.csv").write_text("\n".join(["header", *films]))
    data = load("movielens", path=str(tmp_path))
    (whole,) = data.train(500)
    parts = list(data.train(64))
    for table in data.tables:
        values = torch.cat([part.sparse[table.name].values() for part in parts])
        assert torch.equal(values, whole.sparse[table.name].values())
        assert values.min() >= 0
        assert values.max() < table.num_embeddings
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
    assert sum(len(batch) for batch in data.test(64)) == 50


def test_ratings_alone_will_do(tmp_path):
    write_csv(tmp_path)
    (tmp_path / "movies.csv").unlink()
    batch = next(load("movielens", path=str(tmp_path)).train(8))
    assert batch.sparse["genres"].lengths().sum() == 0


def test_an_installed_recbole_is_found_but_not_imported(tmp_path, monkeypatch):
    folder = tmp_path / "recbole" / "dataset_example" / "ml-100k"
    folder.mkdir(parents=True)
    (tmp_path / "recbole" / "__init__.py").write_text("raise RuntimeError('imported')")
    write_inter(folder)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load("movielens").num_train == 3


def test_bad_files_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(movielens, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"grouplens\.org"):
        load("movielens")
    with pytest.raises(ConfigError, match=r"no ratings\.csv"):
        load("movielens", path=str(tmp_path))
    write_csv(tmp_path)
    with open(tmp_path / "movies.csv", "a") as films:
        films.write("x12,Broken (1999),Drama\n")
    with pytest.raises(InputError, match=r"movies\.csv, film 4: 'x12'"):
        load("movielens", path=str(tmp_path))
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,good,4\n")
    with pytest.raises(InputError, match=r"ratings\.csv, from line 2 on: .*good"):
        load("movielens", path=str(tmp_path))
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n")
    with pytest.raises(InputError, match="has no ratings"):
        load("movielens", path=str(tmp_path))
