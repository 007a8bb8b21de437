"""``tierstore bench device``: what it writes is a topology that the planner takes."""

import argparse
import json
import threading

from bench import device
from bench._drive import Drives
from bench._exchange import exchange_figures
from tierstore.planner import Topology


def test_the_written_file_is_a_topology(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    device.add_arguments(parser)
    out = tmp_path / "topology.json"
    arguments = f"--json {out} --dir {tmp_path} --file-size 4MiB --seconds 0.02 --queue-depth 4 --no-runtime"
    assert device.run(parser.parse_args(arguments.split())) == 0
    topology = Topology.from_dict(json.loads(out.read_text()))
    assert topology.hosts == 1
    assert set(topology.assumed) <= {"intra_host_bw", "inter_host_bw"}
    assert topology.read_seconds(4096) <= topology.read_seconds(65536)
    assert "ssd_read_iops" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["topology.json"]


def test_several_drives_add_up(tmp_path):
    parser = argparse.ArgumentParser()
    device.add_arguments(parser)
    options = "--file-size 4MiB --seconds 0.02 --queue-depth 4 --no-runtime"
    arguments = f"--dir {tmp_path / 'a'} {tmp_path / 'b'} {options}"
    figures = device.measure(parser.parse_args(arguments.split()), 4 << 20)
    assert figures["measured"]["drives"] == 2
    assert Topology.from_dict(figures).read_seconds(4096) > 0
    assert figures["ssd_per_host"] < 1.5 * device.psutil.disk_usage(str(tmp_path)).free  # one file system
    assert [list(path.iterdir()) for path in tmp_path.iterdir()] == [[], []]


def test_drives_are_measured_at_once(tmp_path):
    """What several drives give is the sum of what each gave meanwhile."""
    started = threading.Barrier(3)

    class Drive:
        def reads(self) -> float:
            started.wait(30)
            return 10.0

        def writes(self) -> float:
            started.wait(30)
            return 5.0

        def read_curve(self, seconds, in_flight):
            started.wait(30)
            return [[size, 1000 / size] for size in (4096, 8192, 16384, 32768, 65536)]

    drives = Drives([Drive(), Drive(), Drive()])
    assert drives.measure() == {"write_bytes_per_s": 15.0, "read_iops": 30.0}
    assert drives.read_curve(1.0)[1] == [8192, 3000 / 8192]


def test_what_ranks_exchange_is_measured():
    figures = exchange_figures(2, 0.05)
    topology = Topology(1, 2, "1GiB", "1GiB", device="cpu", **figures)
    assert not {"intra_host_bw", "exchange_seconds"} & set(topology.assumed)
    assert topology.exchange("step") > 0
    assert 1e6 < topology.intra_host_bw < 1e12
