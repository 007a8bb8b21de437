"""``tierstore bench device``: what it writes is a topology that the planner takes."""

import argparse
import json

from bench import device
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


def test_what_ranks_exchange_is_measured():
    figures = exchange_figures(2, 0.05)
    topology = Topology(1, 2, "1GiB", "1GiB", device="cpu", **figures)
    assert not {"intra_host_bw", "exchange_seconds"} & set(topology.assumed)
    assert topology.exchange("step") > 0
    assert 1e6 < topology.intra_host_bw < 1e12
