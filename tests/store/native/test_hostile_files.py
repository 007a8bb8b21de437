"""A directory from a stranger, with checksums that are right: refused, and nothing large is allocated."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.store.native.checksums import crc32c
from tests.store.native.test_golden import FOLDERS, GOLDEN, TABLES
from tests.store.store_model import run_child
from tierstore import _core
from tierstore.errors import StoreCorruptError, StoreIOError

OPEN = (
    "import resource, sys\n"
    "from tests.store.native.test_hostile_files import open_and_read\n"
    "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
    "print(open_and_read(sys.argv[1]))\n"
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
)


def open_and_read(path: str) -> str:
    """What came of opening the store and reading all its rows."""
    import numpy as np

    from tierstore.store.native import NativeConfig, NativeStore

    try:
        with NativeStore(Path(path), TABLES, config=NativeConfig(1 << 20, keep=2)) as store:
            for spec in TABLES:
                for keys in store.keys(spec.index):
                    store.read(keys, np.empty((len(keys), spec.row_bytes), np.uint8))
    except (StoreCorruptError, StoreIOError) as error:
        return type(error).__name__
    return "read"


@pytest.fixture
def folder(tmp_path) -> Path:
    for file in GOLDEN.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def with_crc(data: bytes) -> bytes:
    return data + struct.pack("<I", crc32c(data))


def change(data: bytes, offset: int, value: int, size: int = 4) -> bytes:
    return data[:offset] + value.to_bytes(size, "little") + data[offset + size :]


def outcome(folder: Path) -> str:
    """In a process of its own, whose memory may grow by little."""
    with run_child(OPEN, folder) as child:
        said, grown = child.stdout.read().split()
    assert child.returncode == 0
    assert int(grown) < 60_000  # KiB
    return said


# After the magic, version and store of 28 bytes: next_commit, next_segment, commits.
@pytest.mark.parametrize(("offset", "size"), [(28, 8), (36, 4), (40, 4)])
def test_manifest_of_huge_counts(folder, offset, size):
    data = (folder / "MANIFEST").read_bytes()[:-4]
    (folder / "MANIFEST").write_bytes(with_crc(change(data, offset, 256**size - 1, size)))
    assert outcome(folder) in ("StoreCorruptError", "read")


def test_every_number_of_the_manifest_huge(folder):
    """Lengths of tags and metas, counts and slots of extents: wherever they are."""
    whole = (folder / "MANIFEST").read_bytes()[:-4]
    for offset in range(28, len(whole) - 4):
        (folder / "MANIFEST").write_bytes(with_crc(change(whole, offset, 0x7FFFFFFF)))
        report = _core.verify_store(str(folder), {}, None)
        assert report.findings_total >= 0
        assert open_and_read(str(folder)) in ("StoreCorruptError", "StoreIOError", "read")
        for file in GOLDEN.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())


def test_index_of_huge_counts(folder):
    whole = (folder / "INDEX").read_bytes()
    body = struct.unpack_from("<I", whole, 12)[0]
    for offset in range(16, 16 + body - 4, 4):
        header = change(whole[: 16 + body], offset, 0x7FFFFFFF)
        (folder / "INDEX").write_bytes(with_crc(header) + whole[16 + body + 4 :])
        assert open_and_read(str(folder)) == "read"  # rebuilt without it
        for file in GOLDEN.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "INDEX").write_bytes(change(whole, 12, 0xFFFFFFFF))
    assert outcome(folder) == "read"


@pytest.mark.parametrize(
    ("version", "field", "size"),
    [(2, 20, 4), (2, 24, 4), (3, 20, 4), (3, 24, 4), *((3, 40 + width, 1) for width in range(4))],
)  # slots, voids, and the sizes of the fields of slots
def test_footers_of_huge_counts(folder, version, field, size):
    for file in folder.iterdir():
        file.unlink()
    for file in FOLDERS[version - 2].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for file in folder.glob("*.seg"):
        data = file.read_bytes()
        trailer = change(data[-64:-4], field, 256**size - 1, size)
        file.write_bytes(data[:-64] + with_crc(trailer))
    (folder / "INDEX").unlink()
    assert outcome(folder) == "read"  # from the records


@pytest.mark.parametrize("row_bytes", [0, 1 << 31, 0xFFFFFFFF, 262_145])
def test_segment_headers_of_impossible_sizes(folder, row_bytes):
    file = min(folder.glob("*.seg"))
    data = file.read_bytes()
    file.write_bytes(with_crc(change(data[:48], 12, row_bytes)) + data[52:])
    assert outcome(folder) == "StoreCorruptError"


@pytest.mark.parametrize("name", ["MANIFEST", "INDEX", "00000003.seg"])
def test_links_and_other_files_are_not_followed(folder, tmp_path_factory, name):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / name
    (folder / name).rename(elsewhere)
    before = elsewhere.read_bytes()
    (folder / name).symlink_to(elsewhere)
    report = _core.verify_store(str(folder), {}, None)
    assert any(item.file == name for item in report.findings)
    assert open_and_read(str(folder)) in ("StoreIOError", "read" if name == "INDEX" else "")
    assert elsewhere.read_bytes() == before


def test_sparse_files_of_absurd_sizes(folder):
    for name in ("INDEX", "00000003.seg"):
        with open(folder / name, "r+b") as file:
            file.truncate(1 << 40)
    assert outcome(folder) == "read"
    with open(folder / "MANIFEST", "r+b") as file:
        file.truncate(1 << 40)
    assert outcome(folder) == "StoreCorruptError"
