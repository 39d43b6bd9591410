"""Starts that cannot work end with one sentence."""

import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.embedded import DRAFT_PATH, HEAD_PATH, TARGET_PATH
from sglang_parse.integration import start_checks
from sglang_parse.integration.start_checks import StartError


def arguments(**changes):
    return SimpleNamespace(
        **{
            "speculative_algorithm": "parse",
            "model_path": str(TARGET_PATH),
            "speculative_draft_model_path": str(DRAFT_PATH),
            "load_format": "auto",
            "device": None,
            "host": "127.0.0.1",
            "port": 1,
            "node_rank": 0,
            **changes,
        }
    )


def test_sound_folders_pass():
    """Red if the embedded pair is refused."""
    start_checks.check_start(arguments(), str(HEAD_PATH))
    start_checks.check_start(arguments(speculative_draft_model_path=None), "")


def folder_of(path, positions: int, **more) -> str:
    path.mkdir()
    config = {"max_position_embeddings": positions, **more}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def test_a_draft_that_reads_less_than_the_target_is_told_before_loading(
    tmp_path, monkeypatch
):
    """Red if the start fails after the target is loaded, without the flag to set; or a
    pair that SGLang would serve is refused."""
    monkeypatch.delenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", raising=False)
    long = folder_of(tmp_path / "long", 262144)
    short = folder_of(tmp_path / "short", 40960)
    scaled = folder_of(tmp_path / "scaled", 8192, rope_scaling={"factor": 40})
    pair = {"model_path": long, "speculative_draft_model_path": short}
    with pytest.raises(StartError, match=r"40960 .*262144; set --context-length 40960"):
        start_checks.check_context(arguments(**pair), "")
    with pytest.raises(StartError, match="eagle-model-path"):
        alone = arguments(model_path=long, speculative_draft_model_path=None)
        start_checks.check_context(alone, short)
    start_checks.check_context(arguments(**pair, context_length=40960), "")
    start_checks.check_context(
        arguments(model_path=long, speculative_draft_model_path=scaled), ""
    )
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    start_checks.check_context(arguments(**pair), "")


@pytest.mark.parametrize(
    ("changes", "head", "flag"),
    [
        ({"model_path": "/no/model"}, "", "--model-path"),
        (
            {"speculative_draft_model_path": "/no/draft"},
            "",
            "--speculative-draft-model-path",
        ),
        ({}, "/no/head", "--speculative-parse-eagle-model-path"),
    ],
)
def test_a_missing_folder_names_its_flag(changes, head, flag):
    """Red if a folder that is not there is told without flag or path."""
    with pytest.raises(StartError, match=f"^{flag} '/no/"):
        start_checks.check_start(arguments(**changes), head)


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    """Red if `--device cuda` serves on the CPU without a word."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(StartError, match=r"^--device is 'cuda:0'"):
        start_checks.check_device(arguments(device="cuda:0"))
    start_checks.check_device(arguments(device="cpu"))


@pytest.mark.parametrize("name", ["cuda", "cpu"])
def test_cuda_is_served_where_sglang_is_on_a_gpu(monkeypatch, name):
    """Red if start-up fails on a GPU, whose platform names no text but a device, or the
    CPU platform takes `--device cuda`."""
    from sglang.srt.platforms import current_platform

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    device = torch.device("cuda", 0) if name == "cuda" else "cpu"
    monkeypatch.setattr(
        type(current_platform), "get_device", lambda self, local_rank=0: device
    )
    if name == "cuda":
        start_checks.check_device(arguments(device="cuda"))
        return
    with pytest.raises(StartError, match="the CPU platform is chosen"):
        start_checks.check_device(arguments(device="cuda"))


def test_a_port_that_is_taken_is_refused():
    """Red if a server loads its models before it finds its port taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"--port is {port} and another"):
            start_checks.check_port(arguments(port=port))
        # Other servers are SGLang's own.
        start_checks.check_port(arguments(port=port, speculative_algorithm=None))
        start_checks.check_port(arguments(port=port, node_rank=1))
    start_checks.check_port(arguments(port=port))


def test_hosts_and_ports_that_are_none_are_told():
    """Red if another socket error ends in a traceback."""
    assert "cannot be used" in start_checks.port_problem("192.0.2.7", 4000)
    assert "expected 0 to 65535" in start_checks.port_problem("127.0.0.1", 70000)


@pytest.mark.parametrize(("kind", "lines"), [("StartError", 1), ("ValueError", 4)])
def test_only_start_errors_are_told_in_one_line(kind, lines):
    """Red if a refused start shows a traceback, or a fault of ours shows none."""
    code = (
        "from sglang_parse.integration import start_checks\n"
        "from sglang_parse.integration.start_checks import StartError\n"
        f"start_checks.show_in_one_line()\nraise {kind}('told')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    told = done.stderr.splitlines()
    assert told[-1].endswith("told") and (len(told) == 1) == (lines == 1)
