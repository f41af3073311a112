"""llama.cpp's server, emulated by a small program that checks the requests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.baselines.llama_server import LlamaServer, find_server
from bench.workload import Work
from swiftspec.errors import UserError

pytestmark = pytest.mark.slow  # each test starts processes

WORK = Work(long=[[5] * 40], short=[[1, 2], [3, 4]], tokens=6)
PROGRAM = """#!{python}
import json, os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if "--help" in sys.argv or "--version" in sys.argv:
    print("usage: -m FILE -md FILE {flag} N" if "--help" in sys.argv else "version: 7 (abc)")
    sys.exit()
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if flags["-m"].endswith("crash.gguf"):
    os.kill(os.getpid(), signal.SIGILL)
if not flags["-m"].endswith("good.gguf"):
    print("loading\\nno such model")
    sys.exit(3)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{"status": "ok"}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = asked["n_predict"]
        timings = {{"prompt_per_second": float(len(asked["prompt"])), "predicted_per_second": 2.0}}
        timings["predicted_n"] = count
        if "{flag}" in flags:
            timings |= {{"draft_n": int(flags["{flag}"]), "draft_n_accepted": 2}}
        assert asked["ignore_eos"] and not asked["cache_prompt"] and asked["temperature"] == 0
        self.answer({{"tokens": list(range(count)), "timings": timings}})

    def answer(self, found):
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass

HTTPServer((flags["--host"], int(flags["--port"])), Handler).serve_forever()
"""


def program(folder: Path, flag: str = "--draft-max") -> LlamaServer:
    file = folder / "llama-server"
    file.write_text(PROGRAM.format(python=sys.executable, flag=flag))
    file.chmod(0o755)
    server = find_server(folder)
    assert server is not None
    return server


@pytest.mark.parametrize("flag", ["--spec-draft-n-max", "--draft-max"])
def test_with_a_draft(tmp_path: Path, flag: str) -> None:
    """Two requests of six tokens: five after the first, two of them drafted, so three rounds each."""
    server = program(tmp_path, flag)
    found = server.measure(WORK, tmp_path / "good.gguf", 2, (tmp_path / "draft.gguf", 4))
    assert server.version == "7 (abc)" and found.peak > 0 and found.start > 0
    assert found.prompts == [40.0] and found.rates == [2.0, 2.0] and found.texts == [list(range(6))] * 2
    assert (found.decoded, found.rounds, found.drafted, found.accepted) == (10, 6, 8, 4)


def test_autoregressive_decoding(tmp_path: Path) -> None:
    found = program(tmp_path).measure(WORK, tmp_path / "good.gguf", 1)
    assert (found.decoded, found.rounds, found.drafted) == (10, 10, 0)


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exited with code 3: no such model"):
        program(tmp_path).measure(WORK, tmp_path / "bad.gguf", 1)
