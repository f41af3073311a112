"""An unmodified load generator."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.support.http import READY, Player

pytest.importorskip("guidellm")


@pytest.mark.slow
def test_guidellm(player: Player, plain_url: str, tmp_path: Path) -> None:
    player.prepare(
        text="def add(a, b):\n    return a + b\n" * 20, info=msgspec.structs.replace(READY, max_model_len=4096)
    )
    found = tmp_path / "found.json"
    command = [
        str(Path(sys.executable).parent / "guidellm"), "run", "--backend", f"kind=openai_http,target={plain_url}",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3", "--tokenizer",
        f"kind=hf_auto,model={player.codec.path}", "--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=30",
        "--output", f"kind=json,path={found}", "--disable-console",
    ]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=tmp_path)
    requests = json.loads(found.read_text())["benchmarks"][0]["requests"]
    assert len(requests["successful"]) == 3 and not requests["errored"]
    assert {one["output_metrics"]["text_tokens"] for one in requests["successful"]} == {30}
