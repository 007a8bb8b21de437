"""The command itself: start-up time, version, exit codes, one-line errors."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tierstore
from tierstore.cli import bench, inspect
from tierstore.cli.main import COMMANDS, main
from tierstore.errors import ConfigError


def tierstore_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tierstore.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_imports_nothing_heavy_and_is_quick() -> None:
    code = (
        "import sys\nfrom tierstore.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'numba', 'rich') if m in sys.modules])"
    )
    best = 10.0
    for _ in range(3):
        started = time.perf_counter()
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        best = min(best, time.perf_counter() - started)
    assert result.stdout.rstrip().endswith("[]")
    assert "inspect" in result.stdout
    assert best < 1.0  # 0.1 s on an idle machine; the bound leaves room for a busy one


@pytest.mark.parametrize(
    "words",
    [[name.replace("imports", "import")] for name in COMMANDS]
    + [["bench", name] for name in bench.benchmark_names()],
)
def test_help_fits_80_columns(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--help"])
    shown = capsys.readouterr().out
    assert "usage: tierstore " + " ".join(words) in shown
    assert [line for line in shown.splitlines() if len(line) > 80] == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"tierstore {tierstore.__version__}\n"


def test_without_a_command_the_usage_is_shown() -> None:
    result = tierstore_command()
    assert result.returncode == 2
    assert "usage: tierstore" in result.stderr


def test_an_error_for_users_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith("error: ")
    assert streams.err.count("\n") == 1
    assert "nowhere is not a store directory" in streams.err


def test_debug_raises(tmp_path: Path) -> None:
    with pytest.raises(tierstore.StoreMismatchError):
        main(["--debug", "inspect", str(tmp_path)])


def test_other_value_errors_point_to_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise ValueError("two\nlines")

    monkeypatch.setattr(inspect, "run", fail)
    assert main(["inspect", "x"]) == 2
    assert capsys.readouterr().err == "error: two lines (tierstore --debug shows where)\n"


def test_ctrl_c_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "run", interrupt)
    assert main(["inspect", "x"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_while_the_command_is_imported_exits_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(name: str) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("tierstore.cli.main.import_module", interrupt)
    assert main(["inspect", "x"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "reader", "code"),
    [
        ("bench", "true", 141),
        ("inspect /nowhere 2>&1", "true", 141),
        ("trace describe log.csv --columns user", "true", 141),  # has a table of rich
        ("bench", "cat", 0),
    ],
)
def test_a_pipe_without_reader_ends_the_command_as_it_ends_others(
    arguments: str, reader: str, code: int, tmp_path: Path
) -> None:
    """No other code says so: ``verify`` has 1 for damage."""
    (tmp_path / "log.csv").write_text("user\n1\n2\n")
    command = f"cd '{tmp_path}'; (sleep 0.5; exec '{sys.executable}' -m tierstore.cli {arguments}) | {reader}"
    command += "; exit ${PIPESTATUS[0]}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == code
    assert result.stderr == ""


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_no_exit_code(closed: str) -> None:
    command = f"'{sys.executable}' -m tierstore.cli"
    for arguments, code in (("bench", 0), ("inspect /nowhere", 2)):
        done = subprocess.run(
            ["bash", "-c", f"{command} {arguments} {closed}"], capture_output=True, check=False
        )
        assert done.returncode == code
        assert b"Traceback" not in done.stderr


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom tierstore.cli import console, main\n"
        "main.main = lambda: [os.open('a', os.O_CREAT) for _ in range(3)][0] + 100 * bool(print('lost'))\n"
        "sys.exit(console.console())"
    )
    command = f"'{sys.executable}' -c \"{code}\" <&- >&- 2>&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=False, cwd=tmp_path)
    assert 3 <= done.returncode < 100


def test_an_error_that_cannot_be_told_keeps_its_exit_code() -> None:
    command = f"'{sys.executable}' -m tierstore.cli verify /nowhere 2>/dev/full"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 2


def test_a_full_standard_output_is_named() -> None:
    command = f"'{sys.executable}' -m tierstore.cli bench >/dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: [Errno 28] No space left on device: 'standard output'")
    assert done.stderr.count("\n") == 1


def test_work_goes_on_where_nobody_can_write_its_progress() -> None:
    """The disk of a training's log may be full."""
    code = (
        "import sys\nfrom tierstore.cli import console, main\n"
        "main.main = lambda: [print('batch', n, file=sys.stderr) for n in range(9999)] and 7\n"
        "sys.exit(console.console())"
    )
    command = f"'{sys.executable}' -c \"{code}\" 2>/dev/full"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 7


class TestBench:
    @pytest.fixture(autouse=True)
    def _benchmarks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = tmp_path / "tierstore_bench"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "_shared.py").write_text("")
        (package / "row_reads.py").write_text(
            "SUMMARY = 'Reads rows.'\n"
            "def add_arguments(parser): parser.add_argument('--rows', type=int, required=True)\n"
            "def run(args): print('rows', args.rows); return 3\n"
        )
        for name in [name for name in sys.modules if name.split(".")[0] == "tierstore_bench"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(tmp_path)

    def test_runs_by_name_and_returns_its_code(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "row-reads", "--rows", "5"]) == 3
        assert capsys.readouterr().out == "rows 5\n"

    def test_lists_them(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench"]) == 0
        output = capsys.readouterr().out
        assert "row-reads        Reads rows." in output
        assert "shared" not in output

    def test_its_own_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["bench", "row-reads", "--help"])
        assert "usage: tierstore bench row-reads" in capsys.readouterr().out

    def test_an_unknown_one(self) -> None:
        with pytest.raises(ConfigError, match="no benchmark 'speed'; there are: row-reads"):
            bench.find_benchmark("speed")


def test_ctrl_c_waits_for_the_import_of_torch(tmp_path: Path) -> None:
    """An exception that meets torch's native code there aborts the process."""
    (tmp_path / "slow.py").write_text(
        "import signal\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    print('cut in two')\n"
        "print('whole')\n"
    )
    code = (
        "import sys\nfrom tierstore.cli.whole_import import WholeImport\n"
        "sys.meta_path.insert(0, WholeImport('slow'))\n"
        "try:\n    import slow\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.split() == ["whole", "interrupted"]


def test_ctrl_c_within_torchs_native_code_while_torch_is_imported() -> None:
    """torch's _c10d_init imports modules from C++, and an exception there ends the process."""
    code = (
        "import builtins, linecache, signal, sys\n"
        "from tierstore.cli.main import main\n"
        "real = builtins.__import__\n"
        "def hook(name, *more, **named):\n"
        "    caller = sys._getframe(1)\n"
        "    if '_c10d_init()' in linecache.getline(caller.f_code.co_filename, caller.f_lineno):\n"
        "        print('native import of', name)\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    return real(name, *more, **named)\n"
        "builtins.__import__ = hook\n"
        "sys.exit(main(['bench', 'hit-rate', 'synthetic:zipf:1.05', '--hbm', '64KiB']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "native import of" in done.stdout
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")


@pytest.mark.parametrize(
    ("where", "before", "work"),
    [
        # Python prints and drops an exception that is raised in a callback of LLVM.
        ("'object_cache_notify' in frame.f_code.co_name", "import numba", "numba.njit(lambda x: x + 1)(1)"),
        (
            "(frame.f_globals.get('__name__'), frame.f_code.co_name) == ('llvmlite.binding', '<module>')",
            "pass",
            "import numba",
        ),
    ],
    ids=["while numba compiles", "while numba imports llvmlite"],
)
def test_ctrl_c_within_llvmlite(where: str, before: str, work: str) -> None:
    code = (
        "import signal, sys\n"
        "from tierstore.cli import inspect\n"
        "from tierstore.cli.main import main\n"
        "def interrupt(frame, event, _):\n"
        f"    if event == 'call' and {where}:\n"
        "        sys.setprofile(None)\n"
        "        print('called', flush=True)\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "def run(args):\n"
        f"    {before}\n"
        "    sys.setprofile(interrupt)\n"
        f"    {work}\n"
        "    print('went on')\n"
        "inspect.run = run\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(main(['inspect', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("called\n", "interrupted\n", 130)


def test_ctrl_c_elsewhere_raises_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: object) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    monkeypatch.setattr(inspect, "run", run)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["inspect", "x"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "interrupted\n"
