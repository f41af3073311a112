"""Flag --device of the benchmarks: a GPU that is not there is one line."""

from __future__ import annotations

import argparse
import importlib
import sys

import pytest
import torch

from bench import decode
from bench.common.device import check_device

MODULES = ("bench.decode", "bench.lanes", "bench.ranks", "bench.table6", "bench.ll")


@pytest.mark.parametrize("name", MODULES)
def test_without_a_gpu_one_line_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name, "--device", "cuda"])
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module(name).main()
    assert exit_.value.code == 2
    assert "error: device cuda: PyTorch finds no NVIDIA GPU" in capsys.readouterr().err.splitlines()[-1]


def test_every_rank_needs_its_own_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    parser = argparse.ArgumentParser()
    check_device(parser, "cuda")
    check_device(parser, "cpu", 8)
    with pytest.raises(SystemExit):
        check_device(parser, "cuda", 2)
    assert "--device cuda requires 2 GPUs, one for each rank, not 1" in capsys.readouterr().err


def test_one_gpu_also_decodes_asynchronously(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["decode", "--device", "cuda"])
    args = decode.arguments()
    assert args.modes == "ar,serial,async" and decode.load_options(args).get("device") == "cuda"
    assert args.draft_leaves == 8
    lengths = decode.read_config(args.model).max_position_embeddings, decode.GPU_CONTEXT
    assert decode.load_options(args).get("max_model_len") == min(lengths)
    assert decode.config_of("async", args, together=True).overlap_on_one_gpu
    assert decode.config_of("async", args).num_ranks == 2
    monkeypatch.setattr(sys, "argv", ["decode"])
    args = decode.arguments()
    assert args.modes == "ar,serial" and decode.load_options(args).get("max_model_len") is None
    assert args.draft_leaves == 4
    monkeypatch.setattr(sys, "argv", ["decode", "--max-model-len", "300", "--device", "cuda"])
    assert decode.load_options(decode.arguments()).get("max_model_len") == 300
