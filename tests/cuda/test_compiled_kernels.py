"""nvcc compiles the GPU kernels for every architecture that is meant; nothing here runs them.

What a GPU would make of it is read from the compiler's report and from PTX: registers, spills, the width of
loads, and no fused multiply-add, which would change bits.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tierstore.cuda import args
from tierstore.cuda.cubins import Part
from tierstore.cuda.source import HEADERS, MAIN

_ROOT = Path(__file__).parents[2]
_NVCC = shutil.which("nvcc")
_ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
_OF_RARE_PARTS = ("sm_90",)
_LAYOUTS = [Part(64, 4), Part(64, 4, 1), Part(128, 4), Part(128, 4, 3), Part(17, 1), Part(17, 1, 2)]
_OF_NORMS = [Part(dim, 4, optimizer) for dim in (64, 128) for optimizer in (6, 7, 8, 9)]
"""Updates by LARS, LAMB and the partially row-wise optimizers, which need sums over a row's columns."""
_WITHOUT_STATE_PER_COLUMN = (0, 1)
_OF_16_BITS = [
    Part(*layout, weights)
    for weights in ("bf16", "fp16")
    for layout in ((64, 4, None), (64, 4, 1), (128, 4, 3), (20, 4, 8), (17, 1, None), (17, 1, 7))
]
_OFTEN = [Part(), *_LAYOUTS, Part(128, 4, 8), Part(64, 4, None, "bf16"), Part(64, 4, 1, "bf16")]
_PARTS = list(dict.fromkeys([*_OFTEN, *_OF_NORMS, Part(17, 1, 7), Part(17, 1, 9), *_OF_16_BITS]))
"""Parts that are used often come first: they are compiled for every architecture, others for one."""
_KERNELS = _ROOT / "csrc" / MAIN
_ALIASES = ("LookupOfLayout", "UpdateOfLayout")  # by which kernels.cu names what a part chooses
_REGISTERS = 80  # three blocks of 256 threads fit a multiprocessor
_REGISTERS_OF_SINGLES = 128  # two blocks do
_REGISTERS_OF_COLD = 64  # four do, where an optimizer has no state per column


_OF_SORTS = ("sort_count", "sort_place")
_OF_BATCHES = ("batch_runs", "batch_lengths", "batch_sums", "batch_unique", "batch_positions")


def _kernels(part: Part) -> set[str]:
    if part.dim is None:
        return {"move_rows", "init_rows", "bag_shares", *_OF_SORTS, "sum_rows", *_OF_BATCHES}
    if part.optimizer is None:
        return {"lookup_pooled", "lookup_rows", "weight_grads"}
    return {"update_singles", "update_cold", "update_pieces", "update_hot"}


pytestmark = [
    pytest.mark.timeout(900),  # the first test waits for all compilations
    pytest.mark.skipif(_NVCC is None and "CI" not in os.environ, reason="needs nvcc, of CUDA 12.8 or later"),
]


def _compile(source: Path, output: Path, *options: str) -> str:
    """Compile kernels; return what the compiler reports."""
    assert _NVCC is not None, "continuous integration needs nvcc"
    command = [
        *(_NVCC, "-std=c++20", "-O3", "--fmad=false", "-Werror=all-warnings", "-I", _ROOT / "csrc"),
        *(*options, source, "-o", output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


_COMPILED = {"often": _ARCHITECTURES, "rarely": _OF_RARE_PARTS}


def _architectures(part: Part) -> tuple[str, ...]:
    return _ARCHITECTURES if part in _OFTEN else _OF_RARE_PARTS


def _source_of(architectures: tuple[str, ...]) -> str:
    """Return a source of parts: the kernels of each have its number in their names.

    nvcc takes twice as long to read CUDA's headers as to compile a part.
    """
    lines: list[str] = []
    for number, part in enumerate(_PARTS):
        if number and _architectures(part) != architectures:
            continue
        macros = [option.removeprefix("-D").replace("=", " ") for option in part.defines()]
        macros += [f"{name} {name}_{number}" for name in (*sorted(_kernels(part)), *_ALIASES) if number]
        lines += [f"#define {macro}" for macro in macros]
        lines += [f'#include "{MAIN}"']  # the first time with all headers, where nothing has another name
        lines += [f"#undef {macro.split()[0]}" for macro in macros]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Report:
    """What ptxas reports of a kernel for an architecture."""

    stack: int
    stores: int
    loads: int
    registers: int


@dataclass(frozen=True)
class Compiled:
    """A part of the kernels: what ptxas reports by kernel and architecture, and the kernels' PTX."""

    part: Part
    reports: dict[tuple[str, str], Report]
    ptx: dict[str, str]


def _compile_parts(folder: Path, architectures: tuple[str, ...]) -> tuple[str, str]:
    """Return what the compiler reports of the parts for these architectures, and their PTX."""
    folder.mkdir()
    source = folder / "parts.cu"
    source.write_text(_source_of(architectures))
    options = [f"-gencode=arch=compute_{a[3:]},code={a}" for a in architectures]
    options += ["--fatbin", "-Xptxas", "-v", "--keep", "--keep-dir", str(folder)]
    report = _compile(source, folder / "kernels.fatbin", *options)
    compute = "compute_90." if len(architectures) > 1 else ""
    return report, (folder / f"parts.{compute}ptx").read_text()


@pytest.fixture(scope="module")
def compiled_parts(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """Compile the parts that are used often, and the others at the same time."""
    folder = tmp_path_factory.mktemp("kernels")
    with ThreadPoolExecutor() as pool:
        outputs = pool.map(lambda name: _compile_parts(folder / name, _COMPILED[name]), _COMPILED)
    report, ptx = ("\n".join(texts) for texts in zip(*outputs, strict=True))
    found = re.findall(
        r"Compiling entry function '(\w+)' for '(sm_\d+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores"
        r", (\d+) bytes spill loads.*?Used (\d+) registers",
        report,
        re.DOTALL,
    )
    assert ".func" not in ptx  # a kernel's PTX is all that it runs
    entries = {body.partition("(")[0]: body for body in ptx.split(".visible .entry ")[1:]}
    parts = [Compiled(part, {}, {}) for part in _PARTS]
    for name, architecture, *numbers in found:
        kernel, number = _kernel_and_part(name)
        parts[number].reports[kernel, architecture] = Report(*map(int, numbers))
    for name, body in entries.items():
        kernel, number = _kernel_and_part(name)
        parts[number].ptx[kernel] = body
    return parts


def _kernel_and_part(name: str) -> tuple[str, int]:
    found = re.fullmatch(r"(\w+?)(?:_(\d+))?", name)
    assert found
    return found[1], int(found[2] or 0)


@pytest.fixture(params=range(len(_PARTS)), ids=[str(part) for part in _PARTS])
def compiled(request: pytest.FixtureRequest, compiled_parts: list[Compiled]) -> Compiled:
    return compiled_parts[request.param]


def test_registers_and_spills(compiled: Compiled) -> None:
    part = compiled.part
    assert set(compiled.reports) == set(itertools.product(_kernels(part), _architectures(part)))
    most = {"update_singles": _REGISTERS_OF_SINGLES}
    if part.optimizer in _WITHOUT_STATE_PER_COLUMN:
        most["update_cold"] = _REGISTERS_OF_COLD
    for of, report in compiled.reports.items():
        assert (report.stack, report.stores, report.loads) == (0, 0, 0), of
        assert report.registers <= most.get(of[0], _REGISTERS), of


def test_ptx_keeps_the_bits(compiled: Compiled) -> None:
    part, ptx = compiled.part, "".join(compiled.ptx.values())
    assert set(compiled.ptx) == _kernels(part)
    instructions = set(re.findall(r"^\s+(?:@%\w+ )?([a-z]\w*(?:\.\w+)*)", ptx, re.MULTILINE))
    float_arithmetic = {i for i in instructions if i.endswith((".f32", ".f64"))}
    assert not {i for i in float_arithmetic if i.startswith(("fma", "mad"))}
    assert not {i for i in float_arithmetic if ".approx" in i or ".ftz" in i}
    assert {"add.f32", "mul.f32"} <= float_arithmetic or {"add.rn.f32", "mul.rn.f32"} <= float_arithmetic
    for kernel in _kernels(part) & {"lookup_pooled", "lookup_rows", "update_cold"}:
        body = compiled.ptx[kernel]
        of_update = kernel == "update_cold"
        hint = r"(?:\.nc)?\.L1::no_allocate"
        kind = r"v4\.f32" if part.weights == "fp32" or of_update else r"(?:v4\.[bu]16|(?<=allocate\.)v2\.f32)"
        wide = len(re.findall(rf"ld(?:\.global)?(?:{hint})?\.{kind}", body))
        assert (wide >= 4 if kernel != "lookup_rows" else wide >= 1) if part.vec == 4 else wide == 0
        # The processor widens half precision, and nothing narrows it but our rounding.
        converts = set(re.findall(r"cvt\.\S*f16\S*", body))
        assert converts == ({"cvt.f32.f16"} if part.weights == "fp16" else set())


_ARGUMENTS = {
    "move_rows": args.MoveRowsArgs,
    "init_rows": args.InitRowsArgs,
    "bag_shares": args.BagSharesArgs,
    **dict.fromkeys(_OF_SORTS, args.SortArgs),
    "sum_rows": args.SumsArgs,
    **dict.fromkeys(_OF_BATCHES, args.BatchArgs),
    "lookup_pooled": args.LookupPooledArgs,
    "lookup_rows": args.LookupRowsArgs,
    "weight_grads": args.WeightGradsArgs,
    **dict.fromkeys(("update_singles", "update_cold", "update_pieces", "update_hot"), args.UpdateArgs),
}


def test_arguments_are_as_large_as_the_hosts(compiled: Compiled) -> None:
    """The host gives the driver an address alone, and the driver reads as much as the kernel declares."""
    declared = {
        name: re.search(r"\.param \.align (\d+) \.b8 \w+_param_0\[(\d+)\]", body)
        for name, body in compiled.ptx.items()
    }
    assert {name: found and (int(found[1]), int(found[2])) for name, found in declared.items()} == {
        name: (ctypes.alignment(_ARGUMENTS[name]), ctypes.sizeof(_ARGUMENTS[name]))
        for name in _kernels(compiled.part)
    }


def test_a_thread_reads_four_words_before_it_writes_one(tmp_path: Path) -> None:
    """Few blocks move rows, and a word of the host's memory takes a microsecond."""
    _compile(_KERNELS, tmp_path / "kernels.ptx", "-arch=sm_90", "--ptx")
    body = (tmp_path / "kernels.ptx").read_text().split(".visible .entry move_rows(")[1]
    accesses = re.findall(r"(ld|st)(?:\.global)?\.v4\.f32", body.split(".visible .entry")[0])
    assert "ld ld ld ld st st st st" in " ".join(accesses)


def test_rows_are_read_at_once(compiled_parts: list[Compiled]) -> None:
    """Threads read several rows, past the near cache, before they use one."""
    ptx = {part.part: part.ptx for part in compiled_parts}
    row = r"ld\.global(?:\.nc)?\.L1::no_allocate\.v4\.f32"
    uses = r"st\.global|(?:add|mul)\.(?:rn\.)?f32"
    for part, kernel, count in (
        (Part(64, 4), "lookup_rows", 4),
        (Part(64, 4), "lookup_pooled", 8),
        (Part(64, 4, 1), "update_singles", 8),  # four rows and their gradients
        (Part(64, 4, 1), "update_pieces", 8),
    ):
        found = re.findall(rf"({row})|{uses}", ptx[part][kernel])
        longest = max(len(run) for run in "".join("r" if read else " " for read in found).split())
        assert longest == count, kernel
    assert "st.global.cs.v4.f32" in ptx[Part(64, 4)]["lookup_rows"]


def test_sorts_read_ahead_and_share_no_memory(compiled_parts: list[Compiled]) -> None:
    """A warp reads four groups of keys before it uses one; counters stay in registers."""
    ptx = compiled_parts[0].ptx
    for kernel, reads in (("sort_count", 4), ("sort_place", 8)):
        found = re.findall(r"(ld\.global\.u32)|vote\.sync|st\.global", ptx[kernel])
        longest = max(len(run) for run in "".join("r" if read else " " for read in found).split())
        assert longest >= reads, kernel
    for kernel in (*_OF_SORTS, "sum_rows", *_OF_BATCHES):
        assert not re.search(r"\b(?:atom|red)\.|\.shared|\.local", ptx[kernel]), kernel


def test_the_source_lists_its_headers(tmp_path: Path) -> None:
    """What NVRTC is given is what nvcc reads."""
    report = _compile(_KERNELS, tmp_path / "kernels.d", "-M")
    assert report == ""
    read = {name for name in re.findall(r"csrc/(\S+)", (tmp_path / "kernels.d").read_text())}
    assert read == {MAIN, *HEADERS}


def test_the_fake_driver_has_the_calls_of_the_real_one() -> None:
    """It compiles with NVIDIA's header, too, so its functions and structs are those of the driver."""
    assert _NVCC is not None
    found = subprocess.run([_NVCC, "-v", "--dryrun", "x.cu"], capture_output=True, text=True, check=False)
    include = re.search(r'INCLUDES="-I([^"]+?)"', found.stderr)
    assert include
    command = [
        *(*os.environ.get("CXX", "g++").split(), "-std=c++20", "-fsyntax-only", "-DTIERSTORE_CUDA_H"),
        *("-isystem", include[1].strip(), "-I", _ROOT / "csrc", _ROOT / "csrc/cuda/tests/fake_driver.cc"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
