"""TierConfig: sizes, normalisation, and messages that say what would work."""

import dataclasses

import numpy as np
import pytest

from tierstore.config import ENGINE_NAMES, TableOverride, TierConfig, format_bytes, parse_bytes
from tierstore.errors import ConfigError
from tierstore.store import engine_names


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 64 << 20),
        ("1.5 GiB", 3 << 29),
        ("1TiB", 1 << 40),
        ("64MB", 64_000_000),
        (" 2 pib ", 2 << 50),
        ("4096", 4096),
        ("0", 0),
        (".5KiB", 512),
        ("100B", 100),
        (123, 123),
        (np.int64(5), 5),
    ],
)
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size
    assert type(parse_bytes(text)) is int


@pytest.mark.parametrize("bad", ["", "64 M", "MiB", "-1", "1e9", "1..5GiB", None, True, 1.5, "64 XiB"])
def test_parse_bytes_says_what_works(bad):
    with pytest.raises(ConfigError, match=r'hbm is .*"64MiB"'):
        parse_bytes(bad, "hbm")


def test_negative_bytes():
    with pytest.raises(ConfigError, match="size is -1; give 0 or more bytes"):
        parse_bytes(-1)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (272, "272 B"),
        (64 << 20, "64 MiB"),
        (3 << 29, "1.5 GiB"),
        (1023, "1023 B"),
        (1 << 62, "4096 PiB"),
        (0, "0 B"),
    ],
)
def test_format_bytes(size, text):
    assert format_bytes(size) == text


def test_defaults_are_normalised_to_bytes(tmp_path):
    config = TierConfig()
    assert (config.hbm, config.uvm, config.ssd, config.ssd_cap) == (64 << 20, 0, "auto", 1 << 40)
    assert TierConfig(ssd="2TiB").ssd_cap == 2 << 40
    assert TierConfig(path=tmp_path).path == str(tmp_path)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hbm = 1


def test_memory_for_reading_ahead():
    given = {"auto": "auto", 0: 0, "0": 0, 4096: 4096, "8MiB": 8 << 20, "1.5 KiB": 1536}
    assert [TierConfig(read_ahead=size).read_ahead for size in given] == list(given.values())
    assert TierConfig().read_ahead == "auto"
    assert dataclasses.replace(TierConfig(read_ahead="8MiB"), depth=1).read_ahead == 8 << 20


def test_everything_in_memory_has_no_tier_below():
    config = TierConfig(hbm="all")
    assert config.keeps_all
    assert (config.uvm, config.ssd) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"hbm": 0}, "hbm is 0"),
        ({"hbm": "lots"}, "hbm is 'lots'"),
        ({"hbm": "all", "path": "x"}, "leave one out"),
        ({"hbm": "all", "ssd": "1GiB"}, "leave ssd out, or give hbm bytes"),
        ({"hbm": "all", "uvm": "1GiB"}, "leave uvm out, or give hbm bytes"),
        ({"ssd": 0, "path": "x"}, "ssd is 0"),
        ({"path": ""}, "path is empty"),
        ({"path": "a\0b"}, "has a zero character"),
        ({"path": 3}, "folder's path"),
        ({"engine": "rocks"}, "known engines: native, rocksdb, lmdb, memory"),
        ({"depth": 65}, "from 0 to 64"),
        ({"depth": "deep"}, '"auto" or an integer'),
        ({"depth": True}, '"auto" or an integer'),
        ({"window": -1}, "at least 0"),
        ({"read_ahead": -1}, "read_ahead is -1; give 0 or more bytes"),
        ({"read_ahead": "x"}, "read_ahead is 'x'; write bytes"),
        ({"read_ahead": ""}, "read_ahead is ''; write bytes"),
        ({"read_ahead": None}, "read_ahead is None; write bytes"),
        ({"read_ahead": True}, "read_ahead is True; write bytes"),
        ({"read_ahead": 1.5}, "read_ahead is 1.5; write bytes"),
        ({"policy": 3}, "compile"),
        ({"policy": "clairvoyant"}, "known: lookahead, lru, lfu"),
        ({"tables": {"t": 1}}, "TableOverride"),
        ({"tables": [1]}, "map table names"),
    ],
)
def test_what_cannot_work_is_refused(arguments, text):
    with pytest.raises(ConfigError, match=text):
        TierConfig(**arguments)


def test_table_overrides():
    config = TierConfig(tables={"t1": TableOverride(seed=3)})
    assert config.table("t1").seed == 3
    assert config.table("t2") == TableOverride()
    config.check_tables(["t1", "t2"])
    with pytest.raises(ConfigError, match=r"unknown tables \['t1'\]"):
        config.check_tables(["t2"])


def test_engines_of_config_are_those_of_the_registry():
    assert engine_names() == ENGINE_NAMES
