"""Measures llama.cpp's server, with or without a draft model: speed, prompt rate and acceptance as the server reports
them."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from bench.baselines.build_llama import crash_advice, describe_build, recorded_amx
from bench.baselines.llama_plain import CONTEXT
from bench.workload import WARM_UP, Measured, Work, peak_of
from swiftspec.errors import UserError

PATIENCE = 600.0  # timeout in seconds for loading, and for each answer
BETWEEN = 0.05  # seconds between checks whether the models are loaded
DRAFT_TOKENS = ("--spec-draft-n-max", "--draft-max")  # the same flag in different versions
GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 1, "samplers": ["top_k"]}
UNCHANGED: dict[str, Any] = {"temperature": 1.0, "samplers": ["temperature"], "seed": 0}  # the model's distribution


class LlamaServer:
    """The executable `llama-server`. Each measurement runs it as a separate process."""

    def __init__(self, binary: Path) -> None:
        self.binary = binary
        self._help = self._says("--help")
        version = next(iter(self._says("--version").splitlines()), "unknown").removeprefix("version: ")
        self.version = describe_build(version, recorded_amx(binary.resolve().parent))

    def measure(
        self,
        work: Work,
        target: Path,
        threads: int,
        draft: tuple[Path, int] | None = None,
        sampling: dict[str, Any] = GREEDY,
    ) -> Measured:
        """Serves the GGUF file `target` and returns the measurements of the workload.

        `draft`: GGUF file of the draft, and number of draft tokens per round; None decodes without a draft. `sampling`:
        fields of the requests. Raises UserError if the server does not start or answer.
        """
        with self._running(target, threads, draft) as (process, port, start):
            measured = Measured(start, notes={"version": self.version})
            _complete(port, work.short[0], WARM_UP, sampling)
            for prompt in work.long:
                measured.prompts.append(_complete(port, prompt, 1, sampling)["timings"]["prompt_per_second"])
            for prompt in work.short:
                found = _complete(port, prompt, work.tokens, sampling)
                timings = found["timings"]
                measured.rates.append(timings["predicted_per_second"])
                measured.drafted += timings.get("draft_n", 0)
                measured.accepted += timings.get("draft_n_accepted", 0)
                measured.texts.append(found.get("tokens", []))
                decoded = timings["predicted_n"] - 1  # the prefill produces the first token
                measured.decoded += decoded
                measured.rounds += decoded - timings.get("draft_n_accepted", 0)  # one target token per round
            measured.peak = peak_of(process.pid)
        return measured

    @contextmanager
    def _running(
        self, target: Path, threads: int, draft: tuple[Path, int] | None
    ) -> Iterator[tuple[subprocess.Popen[bytes], int, float]]:
        """Starts the server and yields its process, its port, and the seconds until it accepted requests. Ends it
        afterwards."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [str(self.binary), "-m", str(target), "-t", str(threads), "-c", str(CONTEXT), "-np", "1"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        if draft is not None:
            command += ["-md", str(draft[0]), self._draft_flag(), str(draft[1])]
            if "draft-simple" in self._help:  # newer versions need the drafting method as a flag
                command += ["--spec-type", "draft-simple"]
        began = time.monotonic()
        with TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
            try:
                _wait(process, port, log)
                yield process, port, time.monotonic() - began
            except (OSError, http.client.HTTPException) as error:
                raise UserError(
                    f"llama-server does not respond ({error}); last output: {_last(log)}{_advice(process)}"
                ) from None
            finally:
                process.terminate()

    def _draft_flag(self) -> str:
        for flag in DRAFT_TOKENS:
            if flag in self._help:
                return flag
        raise UserError(f"{self.binary}: supports neither {' nor '.join(DRAFT_TOKENS)}; use another version")

    def _says(self, flag: str) -> str:
        try:
            done = subprocess.run([self.binary, flag], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"{self.binary}: cannot run ({error})") from None
        lines = (done.stdout + done.stderr).splitlines()
        return "\n".join(sorted(lines, key=lambda line: not line.startswith("version")))


def find_server(folder: Path | None) -> LlamaServer | None:
    """Returns the server in `folder`, or the one on PATH if `folder` is None. Returns None if no server is found."""
    found = shutil.which("llama-server", path=None if folder is None else str(folder))
    return None if found is None else LlamaServer(Path(found))


def _wait(process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    """Waits until the models are loaded. Raises UserError if the server ends or takes longer than PATIENCE."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if process.poll() is not None:
            raise UserError(f"llama-server exited with code {process.returncode}: {_last(log)}{_advice(process)}")
        try:
            if _asked(port, "GET", "/health")[0] == 200:
                return
        except OSError:
            pass  # the server does not listen yet
        time.sleep(BETWEEN)
    raise UserError(f"llama-server is not ready after {PATIENCE:.0f} seconds: {_last(log)}")


def _complete(port: int, prompt: list[int], tokens: int, sampling: dict[str, Any]) -> dict[str, Any]:
    """Requests one answer of exactly `tokens` tokens, with prompt caching disabled, and returns the response."""
    asked = {
        "prompt": prompt, "n_predict": tokens, "ignore_eos": True, "cache_prompt": False, "return_tokens": True,
        "stream": False, **sampling,
    }  # fmt: skip
    status, body = _asked(port, "POST", "/completion", json.dumps(asked))
    if status != 200:
        raise UserError(f"llama-server: {body[:200]}")
    return json.loads(body)


def _asked(port: int, method: str, path: str, body: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def _advice(process: subprocess.Popen[bytes]) -> str:
    """Returns how to avoid the crash of a server that a signal has ended, or nothing."""
    try:
        code = process.wait(1.0)  # the connection may end before the process
    except subprocess.TimeoutExpired:
        return ""
    return crash_advice() if code < 0 else ""


def _last(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing"
