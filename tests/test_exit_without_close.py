"""Programs that end in every way while threads of the package run native code, without closing anything.

The interpreter stops a daemon thread when native code returns to it during the shutdown. C++ frames on its stack turn
that into "terminate called without an active exception", and SIGABRT.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.toy_pair import make_pair

ENDINGS = {"end": 0, "exit": 3, "error": 1, "interrupt": -2, "immediate": 4}  # exit codes
TIMES = 1  # each combination
PROGRAM = """
import asyncio, os, resource, signal, sys, threading, time
from pathlib import Path
import torch
from swiftspec import _C, LLM, AsyncEngine, SamplingParams
from swiftspec.backends.cpu.packed_weight_cache import BackgroundWriter
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)

def load():
    return LLM(*sys.argv[1:3], max_model_len=96, threads=2)

def stream(delay_s):
    global rounds
    rounds = load().stream([1, 2], LONG)
    next(rounds)

def thread(delay_s):
    def run():
        while True:
            llm.generate([[1, 2]], LONG, use_tqdm=False)
    llm, before = load(), threading.excepthook
    threading.excepthook = lambda args: None if "this engine is closed" in str(args.exc_value) else before(args)
    threading.Thread(target=run, daemon=True).start()
    time.sleep(delay_s)

def async_engine(delay_s):
    async def run():
        tasks = [asyncio.create_task(anext(engine.generate([1, 2], LONG))) for _ in range(50)]
        await asyncio.sleep(delay_s)
    engine = AsyncEngine(load())
    asyncio.run(run())

def packed_cache(delay_s):
    def write(check_stop):
        while True:
            check_stop()
            torch.mm(matrix, matrix)
    matrix, writer = torch.randn(300, 300), BackgroundWriter()
    writer.add(Path("x"), 1, write)
    writer.resume()
    time.sleep(delay_s)

def thread_limit(delay_s):
    # the operators run on as many threads as there is memory for
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20), -1))
    _C.set_threads(64)
    assert 1 <= _C.threads() < 64

def end(how):
    if how == "exit":
        sys.exit(3)
    if how == "error":
        raise ValueError("planned")
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(9)
    if how == "immediate":
        os._exit(4)

for case in sys.argv[3:]:
    child = os.fork()
    if child == 0:
        work, how, delay_s = case.split(",")
        globals()[work](float(delay_s))
        end(how)
        break
    print(case, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_program_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    dice, works = random.Random(0), ("stream", "thread", "async_engine", "packed_cache", "thread_limit")
    cases = [(work, how, f"{dice.random() / 5:.3f}") for _ in range(TIMES) for work in works for how in ENDINGS]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, make_pair(tmp_path)), *map(",".join, cases)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.stdout.splitlines() == [f"{','.join(case)} {ENDINGS[case[1]]}" for case in cases], ended.stderr
    assert "terminate called" not in ended.stderr and "not rethrown" not in ended.stderr
    assert ended.stderr.count("Traceback") == sum(how in ("error", "interrupt") for _, how, _ in cases)
