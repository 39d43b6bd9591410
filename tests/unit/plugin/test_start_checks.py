"""Starts that cannot work end with one sentence."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sglang_parse.cpu.platform import ParseCpuPlatform
from sglang_parse.embedded import DRAFT_PATH, HEAD_PATH, TARGET_PATH
from sglang_parse.options.server import ParseConfig
from sglang_parse.plugin import start_checks
from sglang_parse.plugin.start_checks import StartError


def arguments(**changes):
    return SimpleNamespace(
        **{
            "speculative_algorithm": "parse",
            "model_path": str(TARGET_PATH),
            "speculative_draft_model_path": str(DRAFT_PATH),
            "revision": None,
            "speculative_draft_model_revision": None,
            "load_format": "auto",
            "device": None,
            "host": "127.0.0.1",
            "api_key": None,
            **changes,
        }
    )


def with_head(path=HEAD_PATH):
    return ParseConfig(compose="eagle3", eagle_model_path=str(path))


def test_sound_folders_pass():
    """Red if the embedded pair is refused."""
    start_checks.check_folders(arguments(), with_head())
    start_checks.check_early(arguments())
    start_checks.check_early(arguments(speculative_draft_model_path=None))


def folder_of(path, positions: int, **more) -> str:
    path.mkdir()
    config = {"max_position_embeddings": positions, **more}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def test_a_head_that_reads_less_than_the_target_is_told_before_loading(
    tmp_path, monkeypatch
):
    """Red if the start fails after the target is loaded, without the flag to set; or a
    pair that is served is refused, as a draft model that reads less is."""
    monkeypatch.delenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", raising=False)
    long = folder_of(tmp_path / "long", 262144)
    short = folder_of(tmp_path / "short", 40960)
    scaled = folder_of(tmp_path / "scaled", 8192, rope_scaling={"factor": 40})
    pair = {"model_path": long, "speculative_draft_model_path": short}
    told = r"eagle-model-path .*40960 .*262144; set --context-length 40960"
    with pytest.raises(ValueError, match=told):
        start_checks.check_context(arguments(**pair), with_head(short))
    start_checks.check_context(arguments(**pair), with_head(scaled))
    of_draft = {"draft_compose": "eagle3", "draft_eagle_model_path": short}
    start_checks.check_context(arguments(**pair), ParseConfig(**of_draft))
    pair_of_long = {**pair, "speculative_draft_model_path": scaled}
    with pytest.raises(ValueError, match=r"draft-eagle-model-path .*draft 262144"):
        start_checks.check_context(arguments(**pair_of_long), ParseConfig(**of_draft))
    start_checks.check_context(arguments(**pair), ParseConfig())
    short_target = arguments(**pair, context_length=40960)
    start_checks.check_context(short_target, with_head(short))
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    start_checks.check_context(arguments(**pair), with_head(short))


@pytest.mark.parametrize(
    ("changes", "config", "flag"),
    [
        ({"model_path": "/no/model"}, ParseConfig(), "--model-path"),
        (
            {"speculative_draft_model_path": "/no/draft"},
            ParseConfig(),
            "--speculative-draft-model-path",
        ),
        ({}, with_head("/no/head"), "--speculative-parse-eagle-model-path"),
    ],
)
def test_a_missing_folder_names_its_flag(changes, config, flag):
    """Red if a folder that is not there is told without flag or path."""
    with pytest.raises(ValueError, match=f"^{flag} '/no/"):
        start_checks.check_folders(arguments(**changes), config)


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    """Red if `--device cuda` serves on the CPU without a word."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^--device is 'cuda:0'"):
        start_checks.check_device(arguments(device="cuda:0"))
    start_checks.check_device(arguments(device="cpu"))


@pytest.mark.parametrize("on_cpu", [True, False])
def test_cuda_is_served_where_sglangs_platform_is_for_it(monkeypatch, on_cpu):
    """Red if start-up fails on a GPU, or the CPU platform takes `--device cuda`."""
    from sglang.srt import platforms

    chosen = ParseCpuPlatform() if on_cpu else platforms.CudaSRTPlatform()
    monkeypatch.setattr(platforms, "_current_platform", chosen)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(start_checks, "get_device", lambda: "cuda")
    if not on_cpu:
        start_checks.check_device(arguments(device="cuda"))
        return
    with pytest.raises(ValueError, match="the CPU platform is chosen"):
        start_checks.check_device(arguments(device="cuda"))


def test_a_machine_without_accelerator_needs_the_platform(monkeypatch):
    """Red if an engine in a program, or --config, ends in SGLang's "No accelerator"
    without a word of the switch."""

    def get_device():
        raise RuntimeError("No accelerator (CUDA, ...) is available.")

    monkeypatch.setattr(start_checks, "get_device", get_device)
    with pytest.raises(StartError, match="set SGLANG_PARSE_CPU_PLATFORM=1 to serve"):
        start_checks.check_early(arguments())


def test_the_first_check_that_fails_is_told():
    """Red if `doctor` lists a check twice, or a start ends with another sentence."""
    with pytest.raises(StartError, match="^--model-path '/no/model' "):
        start_checks.check_early(arguments(model_path="/no/model"))
    names = [check.name for check in start_checks.CHECKS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("kind", "lines"), [("StartError", 1), ("ValueError", 4)])
def test_only_start_errors_are_told_in_one_line(kind, lines):
    """Red if a refused start shows a traceback, or a fault of ours shows none."""
    code = f"class StartError(SystemExit, ValueError):\n    pass\nraise {kind}('told')"
    assert issubclass(StartError, SystemExit) and issubclass(StartError, ValueError)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    told = done.stderr.splitlines()
    assert told[-1].endswith("told") and (len(told) == 1) == (lines == 1)
