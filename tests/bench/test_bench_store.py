"""``tierstore bench store`` on a store of a few rows: every figure is there and makes sense."""

import argparse
import json

from bench import store as bench_store


def test_all_figures_of_two_engines(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    bench_store.add_arguments(parser)
    out = tmp_path / "out.json"
    arguments = (
        "--rows 2000 --batch 500 --seconds 0.02 --rounds 1 --engines native,lmdb,memory --device-file 8MiB"
    )
    arguments += f" --dir {tmp_path} --json {out}"
    assert bench_store.run(parser.parse_args(arguments.split())) == 0
    figures = json.loads(out.read_text())
    for engine in ("native", "lmdb", "memory"):
        for key in (
            "load.rows_per_s",
            "read.rows_per_s",
            "read_window.rows_per_s",
            "read.p50_ms",
            "read.p99_ms",
            "read.cpu_us_per_row",
            "read.useful_per_moved_byte",
            "overwrite.rows_per_s",
            "mix.rows_per_s",
            "write_amplification",
            "reopen_s",
            "commit_1pct_s",
        ):
            assert figures[f"{engine}.{key}"] > 0
    assert figures["device.read_iops"] > 0
    assert figures["native.load.index_bytes_per_row"] > 0
    assert figures["native.read_beside_writes.rows_per_s"] > 0
    assert figures["native.read_beside_compaction.overwritten_rows_per_s"] > 0
    assert figures["ratio.read_beside_compaction"] > 0
    assert figures["native.read_few_beside_compaction.p99_ms"] > 0
    assert figures["device.write_bytes_per_s"] > 0
    for state in ("", "half_superseded.", "compacted."):
        for call in ("scan", "export", "verify"):
            assert figures[f"native.{state}{call}.bytes_per_s"] > 0
            assert figures[f"native.{state}{call}.vs_device"] > 0
    assert figures["native.beside_writer.scan.vs_device"] > 0
    assert figures["native.beside_writer.written_bytes_per_s"] > 0
    for ratio in ("read_vs_device", "write_vs_device", "window_vs_read", "read_vs_memory", "read_vs_lmdb"):
        assert figures[f"ratio.{ratio}"] > 0
    assert "lmdb.read.rows_per_s" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_forms_of_the_index_side_by_side(tmp_path):
    parser = argparse.ArgumentParser()
    bench_store.add_arguments(parser)
    out = tmp_path / "out.json"
    arguments = "--rows 100000 --batch 5000 --seconds 0.02 --rounds 1 --engines native:hash,native:compact"
    arguments += f" --id-spread 1 --row-bytes 16 --device-file 8MiB --dir {tmp_path} --json {out}"
    assert bench_store.run(parser.parse_args(arguments.split())) == 0
    figures = json.loads(out.read_text())
    assert figures["ratio.read_vs_native:compact"] > 0
    bytes_per_row = {form: figures[f"native:{form}.load.index_bytes_per_row"] for form in ("hash", "compact")}
    assert bytes_per_row["compact"] < bytes_per_row["hash"]


def test_a_store_on_two_devices(tmp_path):
    """The native store is spread over both; other engines have the first."""
    parser = argparse.ArgumentParser()
    bench_store.add_arguments(parser)
    out = tmp_path / "out.json"
    arguments = "--rows 2000 --batch 500 --seconds 0.02 --rounds 1 --engines native,memory --device-file 8MiB"
    arguments += f" --dir {tmp_path / 'a'} {tmp_path / 'b'} --json {out}"
    assert bench_store.run(parser.parse_args(arguments.split())) == 0
    figures = json.loads(out.read_text())
    for name in ("native", "memory"):
        assert figures[f"{name}.read.rows_per_s"] > 0
    assert figures["ratio.read_vs_device"] > 0
    assert not any("scan" in name for name in figures)
    assert [list(path.iterdir()) for path in tmp_path.iterdir() if path.is_dir()] == [[], []]
