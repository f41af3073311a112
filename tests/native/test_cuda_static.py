"""The static checks of compiled kernels (tools/sass_gate.py), and tests of the checks themselves."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tools import sass_gate
from tools.sass_gate import Kernel, Report

NVCC = shutil.which("nvcc")
LOG = """
ptxas info    : Compiling entry function '_Z4goodv' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
ptxas info    : Compiling entry function '_Z3badv' for 'sm_90'
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers
"""
SASS = """
	.section	.text._Z4goodv,"ax",@progbits
        /*0000*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0010*/              @!P0 UBLKCP.S.G [UR4], [UR6], UR8 ;
	.section	.text._Z3badv,"ax",@progbits
        /*0000*/               @P1 LDL.64 R2, [R1+0x8] ;
"""


def test_reports_are_parsed() -> None:
    kernels = sass_gate.read_ptxas(LOG)
    assert (kernels["_Z4goodv"].registers, kernels["_Z3badv"].stack, kernels["_Z3badv"].spills) == (40, 16, 12)
    counts = sass_gate.read_sass(SASS)
    assert counts["_Z4goodv"] | {"HMMA": 1, "UBLKCP": 1, "LDL": 0} == counts["_Z4goodv"]
    assert counts["_Z3badv"]["LDL"] == 1
    ptx = ".visible .entry _Z1a(\n mma.sync\n}\n.visible .entry _Z1b(\n add\n}\n"
    assert {name: "mma.sync" in body for name, body in sass_gate.read_ptx(ptx).items()} == {"_Z1a": True, "_Z1b": False}


def test_kernel_names_are_demangled() -> None:
    long = "void swiftspec::cuda::(anonymous namespace)::linear_kernel<true, 1, a::(anonymous namespace)::One>(a::One)"
    assert sass_gate.plain_name(long) == "linear_kernel<true, 1, One>"


def test_faults_are_detected() -> None:
    ptx = " ".join(sass_gate.required(sass_gate.HOPPER)["linear_kernel"])
    good = Report("1", {"linear: linear_kernel<1>": Kernel(40, ptx=ptx, counts={"LDL": 0})})
    assert sass_gate.broken_rules(good) == []
    for bad in (Kernel(40, stack=8, ptx=ptx), Kernel(40, spills=4, ptx=ptx), Kernel(40, ptx=ptx, counts={"STL": 1}),
                Kernel(40, ptx=ptx.replace("mma", ""))):  # fmt: skip
        assert len(sass_gate.broken_rules(Report("1", {"linear: linear_kernel<1>": bad}))) == 1
    too_early = " ".join(("ld.param.b64 %rd1, [p];", "ld.global.b32 %r1, [%rd1];", ptx))
    early = sass_gate.broken_rules(Report("1", {"linear: linear_kernel<1>": Kernel(40, ptx=too_early)}))
    assert early == ["linear: linear_kernel<1>: ld.global.b32 before griddepcontrol.wait"]
    ahead = " ".join(("fence.proxy.async.global;", ptx))
    early = sass_gate.broken_rules(Report("1", {"linear: linear_kernel<1>": Kernel(40, ptx=ahead)}))
    assert early == ["linear: linear_kernel<1>: fence.proxy.async.global before griddepcontrol.wait"]
    for load, stale in (("ld.global.s64", True), ("ld.global.cg.s64", False), ("ld.global.v4.u32", False)):
        prepared = " ".join((ptx, f"{load} %rd2, [%rd1];", sass_gate.WAIT))
        found = sass_gate.broken_rules(Report("1", {"linear: linear_kernel<1>": Kernel(40, ptx=prepared)}))
        message = f"linear: linear_kernel<1>: {load} through L1 before griddepcontrol.wait"
        assert found == ([message] if stale else [])
    written = {"nvcc": "1", "kernels": {"linear: linear_kernel<1>": {"registers": 41, "HMMA": 3}}}
    assert sass_gate.changed_figures(good, written) == ["linear: linear_kernel<1>: registers 41 -> 40"]
    assert sass_gate.changed_figures(good, written | {"nvcc": "2"}) == []
    assert len(sass_gate.changed_figures(Report("1"), written)) == 1


def test_the_present_sources_were_checked() -> None:
    message = "the CUDA sources changed: run `python -m tools.sass_gate --write`"
    assert json.loads(sass_gate.FIGURES.read_text())["sources"] == sass_gate.sources_digest(), message


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize("kernel", ["linear/linear", "linear/direct", "linear/stream", "attention/attention"])
def test_kernels_with_stamps_compile(kernel: str, tmp_path: Path) -> None:
    """Builds with SWIFTSPEC_STAMPS have more code; every point that a kernel passes reads the clock."""
    out, source = tmp_path / "out.ptx", sass_gate.ROOT / f"csrc/cuda/{kernel}.cu"
    options = ("-std=c++20", "-arch=sm_90a", "-DSWIFTSPEC_STAMPS=1", f"-I{sass_gate.ROOT / 'csrc'}", "-ptx")
    subprocess.run([str(NVCC), *options, "-o", str(out), str(source)], check=True)
    assert "%clock64" in out.read_text()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(NVCC is None or shutil.which("c++filt") is None, reason="no nvcc, or no c++filt")
def test_the_code_of_nvcc_passes_the_checks() -> None:
    """For every architecture. Run `python -m tools.sass_gate --write` after an intended change."""
    report = sass_gate.compile_all(str(NVCC))
    assert {kernel.arch for kernel in report.kernels.values()} == set(sass_gate.ARCHS)
    assert sass_gate.broken_rules(report) == []
    assert sass_gate.changed_figures(report, json.loads(sass_gate.FIGURES.read_text())) == []
