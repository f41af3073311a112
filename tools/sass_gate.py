"""Static checks of the compiled CUDA kernels against tests/data/cuda_static.json. Needs no GPU.

    python -m tools.sass_gate            compile, check, report differences
    python -m tools.sass_gate --write    compile, check the rules, and update the figures

Every source is compiled for every architecture. The rules apply to every kernel and compiler release: no spills, no
stack, no local memory, and the instructions that `required` lists. The figures (registers, and instruction counts if
nvdisasm is found in PATH or in the package nvidia-cuda-nvdisasm) are for Hopper; they are compared only if the same
nvcc release wrote them. The file also has the digest of the sources that were checked last; a fast test compares it, so
that every change of a kernel is compiled and checked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "tests/data/cuda_static.json"
WAIT = "griddepcontrol.wait"  # in kernels that may start before the previous kernel has ended
ARCHS = (80, 86, 89, 90, 100, 120)
HOPPER, SMALL_BLACKWELL = 90, 120
EVERYWHERE = {
    "linear_kernel": ("mma.sync.aligned.m16n8k16",),
    "linear_kernel<.*(SingleRank|VirtualRanks)": ("ld.relaxed.sys.global.v2.b64",),
    "large_m_kernel": ("mma.sync.aligned.m16n8k16",),
    "direct_kernel": ("mma.sync.aligned.m16n8k16",),
    "attention_kernel": ("mma.sync.aligned.m16n8k16", "ldmatrix.sync.aligned.m8n8.x4.trans", "cp.async.cg.shared"),
    "gather_kernel": ("ld.relaxed.sys.global.v2.b64", "st.relaxed.sys.global.v2.b64"),
}
# On GPUs with bulk copies and programmatic dependent launch.
BULK = {
    "linear_kernel": ("cp.async.bulk.shared", "cp.async.bulk.prefetch.L2", WAIT, "mbarrier.try_wait",
                      "griddepcontrol.launch_dependents"),
    "direct_kernel": ("cp.async.bulk.shared", "cp.async.bulk.prefetch.L2", WAIT, "mbarrier.try_wait",
                      "griddepcontrol.launch_dependents"),
    "large_m_kernel": ("cp.async.bulk.shared", "cp.async.bulk.prefetch.L2", WAIT, "fence.proxy.async.global",
                    "mbarrier.try_wait", "griddepcontrol.launch_dependents"),
    **dict.fromkeys(("attention_kernel", "gather_kernel", "children_kernel", "many_children_kernel",
                     "draw_keyed_kernel", "list_keys_kernel", "embed_kernel", "add_kernel", "root_kernel",
                     "rope_append_kernel", "leaves_kernel", "pack_activations_kernel", "pack_slabs_kernel",
                     "resample_kernel"), (WAIT,)),
}  # fmt: skip
# On GPUs without bulk copies and programmatic dependent launch.
WITHOUT_BULK = dict.fromkeys(("linear_kernel", "large_m_kernel", "direct_kernel"),
                      ("cp.async.cg.shared", "cp.async.mbarrier.arrive.noinc", "mbarrier.test_wait",
                       "prefetch.global.L2"))  # fmt: skip
CLUSTERS = dict.fromkeys(("attention_kernel", "children_kernel", "many_children_kernel", "direct_kernel",
                          "draw_keyed_kernel", "large_m_kernel", "pack_activations_kernel<.*, true>"),
                          ("mapa", "barrier.cluster.arrive", "barrier.cluster.wait"))  # fmt: skip
WGMMA = {"prefill_kernel": ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", "cp.async.bulk.shared", WAIT,
                            "fence.proxy.async.global")}  # fmt: skip
# blocks of resample_kernel synchronise, but do not read each other's shared memory
CLUSTERS |= {"resample_kernel": ("barrier.cluster.arrive", "barrier.cluster.wait")}


def required(arch: int) -> dict[str, tuple[str, ...]]:
    """Returns the instructions that the PTX of a kernel must contain, by a pattern of the beginning of its name."""
    tables = [
        BULK if arch >= HOPPER else WITHOUT_BULK,
        *([CLUSTERS] if HOPPER <= arch < SMALL_BLACKWELL else []),
        *([WGMMA] if arch == HOPPER else []),
        EVERYWHERE,
    ]
    names = {name for table in tables for name in table}
    return {name: tuple(text for table in tables for text in table.get(name, ())) for name in names}


# Accesses that a waiting kernel must not make before it waits. Bulk copies are allowed, since they fetch weights, which
# no kernel writes; bulk copies of other data follow a fence.
TOUCHES = re.compile(
    r"\b(?:ld|st|atom|red)\.(?!param|shared|const|local)[\w.:]+|\bcp\.async\.c[ag][\w.]*|\bfence\.proxy\.async\.global"
)
# Loads through L1 that a kernel with two waits, of which `prepared` skips the first, must not make before the second
# one: L1 may have an older line. Only tables of RoPE are loaded so, 32 bits at a time or four times that.
STALE = re.compile(r"\bld\.global\.(?!cg\.|(?:v4\.)?[bu]32\b)[\w.]+")
# Instructions that are counted, by prefix.
COUNTED = ("HMMA", "HGMMA", "UBLKCP", "UBLKPF", "LDL", "STL", "ACQBULK", "PREEXIT", "CALL")
LOCAL = ("LDL", "STL")
SLOW_TO_COMPILE = ("linear", "attention")


@dataclass
class Kernel:
    """A compiled kernel: the report of ptxas, its PTX, and instruction counts (None without a disassembler)."""

    registers: int = -1
    stack: int = 0
    spills: int = 0
    ptx: str = ""
    arch: int = HOPPER
    counts: dict[str, int] | None = None
    serialised: bool = False  # ptxas waits after every wgmma

    def figures(self) -> dict[str, int]:
        return {"registers": self.registers} | (self.counts or {})


@dataclass
class Report:
    """The kernels of one compiler release."""

    release: str
    kernels: dict[str, Kernel] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, dict[str, int]]:
        return {name: kernel.figures() for name, kernel in sorted(self.kernels.items()) if kernel.arch == HOPPER}


def sources_digest() -> str:
    """Returns the SHA-256 digest of every file that the kernels are compiled from."""
    csrc = ROOT / "csrc"
    files = [csrc / "kernels_cuda.h", *(csrc / "cuda").rglob("*.*"), *(csrc / "common").rglob("*.*")]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(csrc).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def nvcc_release(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\S+?),? V(\S+)", text)
    return found[2] if found else "unknown"


def find_nvdisasm() -> str | None:
    places = [Path(sysconfig.get_path("purelib")) / "nvidia" / name / "bin" for name in ("cu13", "cuda_nvdisasm")]
    return shutil.which("nvdisasm") or next((str(p / "nvdisasm") for p in places if (p / "nvdisasm").exists()), None)


def plain_names(mangled: list[str]) -> dict[str, str]:
    """Returns for each mangled name a plain one, such as linear_kernel<true, 1, SingleRank>."""
    run = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True)
    return {name: plain_name(text) for name, text in zip(mangled, run.stdout.splitlines())}


def plain_name(text: str) -> str:
    text = re.sub(r"\(anonymous namespace\)::|\b\w+::", "", text).removeprefix("void ")
    depth = 0
    for i, c in enumerate(text):  # up to the arguments
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            return text[:i]
    return text


def read_ptxas(log: str) -> dict[str, Kernel]:
    """Returns the kernels in the output of ptxas -v, by mangled name."""
    kernels: dict[str, Kernel] = {}
    here = Kernel()
    serialised = set(re.findall(r"wgmma.mma_async instructions are serialized .* in the function '(\w+)'", log))
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)'", line):
            here = kernels[found[1]] = Kernel(serialised=found[1] in serialised)
        if found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            here.stack, here.spills = max(here.stack, int(found[1])), here.spills + int(found[2]) + int(found[3])
        if found := re.search(r"Used (\d+) registers", line):
            here.registers = int(found[1])
    return kernels


def read_ptx(text: str) -> dict[str, str]:
    """Returns the body of every entry, by mangled name."""
    parts = re.split(r"\.entry (\w+)\(", text)
    return dict(zip(parts[1::2], parts[2::2]))


def read_sass(text: str) -> dict[str, dict[str, int]]:
    """Returns the counts of the COUNTED instructions, by mangled name."""
    counts: dict[str, dict[str, int]] = {}
    parts = re.split(r"\.section\s+\.text\.(\w+)", text)
    for name, body in zip(parts[1::2], parts[2::2]):
        used = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", body, re.MULTILINE))
        counts[name] = {wanted: sum(n for op, n in used.items() if op.startswith(wanted)) for wanted in COUNTED}
    return counts


def compile_one(nvcc: str, source: Path, arch: int) -> dict[str, Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        name = f"sm_{arch}{'a' if arch == HOPPER else ''}"  # as setup.py
        command = [nvcc, "-std=c++20", "-O3", f"-arch={name}", "-Xptxas", "-v", f"-I{ROOT / 'csrc'}", "--keep"]
        command += ["--keep-dir", folder, "-cubin", str(source), "-o", str(cubin)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise SystemExit(f"{source.name} does not compile for sm_{arch}:\n{run.stderr}")
        kernels = read_ptxas(run.stderr + run.stdout)
        ptx = read_ptx("".join(file.read_text() for file in sorted(Path(folder).glob("*.ptx"))))
        nvdisasm = find_nvdisasm() if arch == HOPPER else None
        counts: dict[str, dict[str, int]] = {}
        if nvdisasm is not None:
            counts = read_sass(
                subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True).stdout
            )
    for name, kernel in kernels.items():
        kernel.ptx, kernel.counts, kernel.arch = ptx[name], counts.get(name), arch
    plain = plain_names(list(kernels))
    where = source.stem if arch == HOPPER else f"{source.stem} sm_{arch}"
    return {f"{where}: {plain[name]}": kernel for name, kernel in kernels.items()}


def compile_all(nvcc: str, archs: Sequence[int] = ARCHS) -> Report:
    """Compiles every .cu for these architectures, two at a time, slow ones first."""
    report = Report(nvcc_release(nvcc))
    sources = sorted(
        (ROOT / "csrc/cuda").glob("*/*.cu"), key=lambda source: (source.stem not in SLOW_TO_COMPILE, source)
    )
    jobs = [(source, arch) for source in sources for arch in archs]
    with ThreadPoolExecutor(2) as pool:
        for kernels in pool.map(lambda job: compile_one(nvcc, *job), jobs):
            report.kernels |= kernels
    return report


def broken_rules(report: Report) -> list[str]:
    complaints = []
    for name, kernel in report.kernels.items():
        plain = name.partition(": ")[2]
        if kernel.stack or kernel.spills:
            complaints.append(f"{name}: {kernel.stack} bytes of stack, {kernel.spills} spilled")
        if kernel.serialised:
            complaints.append(f"{name}: ptxas serialises wgmma")
        complaints += [f"{name}: local memory ({op})" for op in LOCAL if (kernel.counts or {}).get(op)]
        wanted = [w for start, names in required(kernel.arch).items() if re.match(start, plain) for w in names]
        complaints += [f"{name}: no {text}" for text in wanted if text not in kernel.ptx]
        if (early := TOUCHES.search(kernel.ptx.partition(WAIT)[0])) and WAIT in kernel.ptx:
            complaints.append(f"{name}: {early[0]} before {WAIT}")
        if stale := STALE.search(WAIT.join(kernel.ptx.split(WAIT)[1:-1])):
            complaints.append(f"{name}: {stale[0]} through L1 before {WAIT}")
    return complaints


def changed_figures(report: Report, written: dict) -> list[str]:
    """Returns the differences to the written figures, in counters that both have.

    There are none if another nvcc release wrote them.
    """
    if written["nvcc"] != report.release:
        return []
    old, new, complaints = written["kernels"], report.figures, []
    for name in sorted(old.keys() | new.keys()):
        if name not in new or name not in old:
            complaints.append(f"{name}: {'new' if name not in old else 'removed'}")
            continue
        before, now = old[name], new[name]
        both = [key for key in before.keys() & now.keys() if before[key] != now[key]]
        complaints += [f"{name}: {key} {before[key]} -> {now[key]}" for key in both]
    return complaints


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks the compiled CUDA kernels against the committed figures.")
    parser.add_argument("--write", action="store_true", help="update the figures")
    arguments = parser.parse_args()
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    report = compile_all(nvcc)
    complaints = broken_rules(report)
    if arguments.write and find_nvdisasm() is None:
        raise SystemExit("the figures need nvdisasm: pip install nvidia-cuda-nvdisasm")
    if arguments.write and not complaints:
        written = {"nvcc": report.release, "sources": sources_digest(), "kernels": report.figures}
        FIGURES.write_text(json.dumps(written, indent=1) + "\n")
    elif not arguments.write:
        complaints += changed_figures(report, json.loads(FIGURES.read_text()))
    for line in complaints:
        print(line)
    print(f"{len(report.kernels)} kernels, nvcc {report.release}, {len(complaints)} complaints")
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
