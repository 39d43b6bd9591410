"""Server arguments that PARSE refuses, each with one sentence."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.server_args import prepare_server_args

from benchmarks.models import OTHER_DRAFT_PATH
from sglang_parse.embedded import (
    DRAFT_PATH,
    HEAD_PATH,
    TARGET_PATH,
)
from sglang_parse.options.server import CONFIG_ENV, ParseConfig
from sglang_parse.plugin import refusals
from tests.support.resolution import DRAFT, TARGET, resolve

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.fixture(autouse=True)
def no_config_env(monkeypatch):
    monkeypatch.delenv(CONFIG_ENV, raising=False)


def refused(flags, named, *features):
    """A row of REFUSED. features: what docs/matrix.md says is refused together."""
    return pytest.param(flags, named, marks=pytest.mark.refuses(*features))


# Flags, and what the sentence names.
# The sentence names these as they are given.
NAMED = (
    *("--speculative-adaptive", "--enable-flexkv"),
    *("--enable-unified-cache-external-linker", "--enable-prefill-cp"),
    *("--kv-canary log", "--moe-dense-tp-size 1"),
    "--speculative-use-rejection-sampling",
    "--speculative-accept-threshold-single 0.5",
    *("--speculative-accept-threshold-acc 0.5", "--speculative-token-map map.pt"),
    *("--enable-deterministic-inference", "--rl-on-policy-target fsdp"),
    "--speculative-draft-attention-backend flex_attention",
    "--decode-attention-backend flex_attention",
    "--prefill-attention-backend flex_attention",
)
REFUSED = (
    *((flags, flags) for flags in NAMED),
    ("--pp-size 2", "--pipeline-parallel-size"),
    refused("--tp 2 --attn-dp-size 2", "--attn-dp-size", "DP attention"),
    refused(
        "--disaggregation-mode decode", "--disaggregation-mode", "PD disaggregation"
    ),
    ("--disaggregation-mode prefill", "--disaggregation-mode"),
    refused("--enable-lora --max-lora-rank 8", "--enable-lora", "LoRA"),
    ("--lora-paths a=/nowhere", "lora"),
    ("--enable-hisparse", "hisparse"),
    refused(
        "--enable-hierarchical-cache --speculative-parse-compose mtp",
        "--enable-hierarchical-cache brings back",
        *("hierarchical cache", "head"),
    ),
    (
        "--enable-hierarchical-cache --speculative-parse-compose eagle3 "
        f"--speculative-parse-eagle-model-path {HEAD_PATH}",
        "--enable-hierarchical-cache brings back",
    ),
    (
        "--enable-hierarchical-cache --hicache-storage-backend file",
        "--hicache-storage-backend",
    ),
    ("--enable-two-batch-overlap", "two-batch-overlap|two_batch_overlap"),
    ("--enable-mixed-chunk", "mixed-chunk|mixed_chunk"),
    (
        "--model-impl transformers",
        "does not support --model-impl transformers: .*; expected auto or sglang",
    ),
    ("--enable-streaming-session", "does not support --enable-streaming-session"),
    ("--tp-size 2 --dcp-size 2", "--dcp-size 2"),
    ("--tp-size 2 --attn-cp-size 2", "attn.cp.size"),
    ("--enable-pdmux --chunked-prefill-size -1", "--enable-pdmux"),
    (
        "--reasoning-parser qwen3 --enable-strict-thinking",
        "does not support --enable-strict-thinking",
    ),
    (
        "--attention-backend flashinfer --dtype float32",
        "--dtype is float32 and FlashInfer has no kernels",
    ),
    ("--enable-lmcache", "LMCache|--enable-lmcache"),
    ("--moe-a2a-backend deepep", "moe-a2a-backend|deepep"),
    ("--speculative-use-block-verification", "block.verification"),
    ("--grammar-backend outlines", "does not support --grammar-backend outlines"),
    ("--speculative-eagle-topk 4", "takes no --speculative-eagle-topk, got 4"),
    ("--speculative-num-steps 5", "takes no --speculative-num-steps, got 5"),
    (
        "--speculative-num-draft-tokens 8",
        "takes no --speculative-num-draft-tokens, got 8",
    ),
    (
        "--page-size 48 --chunked-prefill-size 64",
        "--page-size is 48; expected a divisor of --chunked-prefill-size, which is 64",
    ),
    (
        "--prefill-attention-backend triton --decode-attention-backend flashinfer "
        "--speculative-attention-mode decode",
        "--speculative-attention-mode is decode",
    ),
    (
        "--prefill-attention-backend fa3 --page-size 16",
        "--page-size is 16; expected at most 1",
    ),
    (
        f"--speculative-parse-compose eagle3 --attention-backend fa3 "
        f"--speculative-parse-eagle-model-path {HEAD_PATH}",
        "add --speculative-draft-attention-backend flashinfer",
    ),
)


@pytest.mark.parametrize(("flags", "named"), REFUSED)
def test_unsupported_combination_is_refused_by_name(flags, named):
    """Red if a row of the refusal table is lost, or SGLang serves what it refuses
    itself: the server would answer wrongly."""
    kinds = (ValueError, AssertionError, NotImplementedError)
    with pytest.raises(kinds, match=named) as error:
        resolve(*TARGET, *DRAFT, *flags.split())
    assert "\n" not in str(error.value).strip()


def test_each_refusal_says_what_is_missing():
    """Red if a field that is refused is none of SGLang's, or its sentence gives no
    reason, or not the values to choose from."""
    args = SimpleNamespace(**dict.fromkeys(refusals.SERVED))
    refusals.check_arguments(args)
    known = prepare_server_args([*TARGET])
    for field, (served, why) in refusals.SERVED.items():
        assert hasattr(known, field)
        with pytest.raises(ValueError) as error:
            refusals.check_arguments(SimpleNamespace(**{field: "else"}))
        end = (
            f"{refusals.flag_of(field)} else: {why}; expected {refusals.told(served)}."
        )
        assert str(error.value).endswith(f"does not support {end}")


@pytest.mark.parametrize(
    "variable", ["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "SGLANG_RUST_SERVER"]
)
def test_switches_of_the_environment_are_refused(monkeypatch, variable):
    """Red if passes outside graphs are left without memory, or a server starts that
    has no reports."""
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match=f"does not support {variable}"):
        resolve(*TARGET, *DRAFT)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--speculative-parse-window", "8"), "window"),
        (("--speculative-parse-config", "/nowhere.json"), "config"),
        (("--no-speculative-parse-adaptive",), "adaptive"),
    ],
)
@pytest.mark.parametrize("algorithm", [(), ("--speculative-algorithm", "NGRAM")])
def test_own_flag_without_the_algorithm_is_refused(flags, named, algorithm):
    """Red if a user who forgot the algorithm is served without it, and not told."""
    with pytest.raises(ValueError, match=f"--speculative-parse-{named} is set but"):
        resolve("--model-path", str(TARGET_PATH), *algorithm, *flags)


def exchange_tokens(path, **changes):
    """The draft model with two tokens of its tokenizer exchanged.

    changes: other entries of its tokenizer.json.
    """
    shutil.copytree(DRAFT_PATH, path)
    file = path / "tokenizer.json"
    content = json.loads(file.read_text()) | changes
    vocab = content["model"]["vocab"]
    a, b = list(vocab)[100:102]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    file.write_text(json.dumps(content))
    return str(path)


def test_draft_with_another_tokenizer_drafts_in_text(tmp_path):
    """Red if a pair that speaks different ids is refused though its text is known."""
    for path in (exchange_tokens(tmp_path / "draft"), str(OTHER_DRAFT_PATH)):
        resolve(*TARGET, "--speculative-draft-model-path", path)


def test_draft_whose_tokens_are_not_known_as_text_is_refused(tmp_path):
    """Red if such a pair is served, or the sentence does not name the first token."""
    other = exchange_tokens(tmp_path / "draft", decoder=None)
    with pytest.raises(ValueError) as error:
        resolve(*TARGET, "--speculative-draft-model-path", other)
    told = str(error.value)
    assert told.startswith(
        "--speculative-draft-model-path needs the target's tokenizer"
    )
    assert " is id " in told and "of the draft's its decoder is none" in told


@pytest.mark.parametrize(
    "flag", ["--quantization", "--speculative-draft-model-quantization"]
)
def test_quantised_weights_are_served_on_a_gpu_alone(monkeypatch, flag):
    """Red if a start on the CPU fails in a kernel that is for GPUs alone, or SGLang's
    flag is refused where its kernels are."""
    with pytest.raises(ValueError, match=f"{flag} is fp8, whose kernels run on a GPU"):
        resolve(*TARGET, *DRAFT, flag, "fp8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = {"quantization": None, "speculative_draft_model_quantization": None}
    args |= {"model_path": "", "speculative_draft_model_path": "", "device": "cuda"}
    args[flag[2:].replace("-", "_")] = "fp8"
    refusals.check_quantization(SimpleNamespace(**args), ParseConfig())


def test_a_folder_of_quantised_weights_is_refused_on_a_cpu(tmp_path):
    """Red if the quantised checkpoint is noticed only by a missing kernel."""
    folder = tmp_path / "draft"
    shutil.copytree(DRAFT_PATH, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    args = SimpleNamespace(
        device="cpu",
        quantization=None,
        model_path=str(TARGET_PATH),
        speculative_draft_model_quantization=None,
        speculative_draft_model_path=str(folder),
    )
    with pytest.raises(ValueError, match="-draft-model-path .* quantised by awq"):
        refusals.check_quantization(args, ParseConfig())


def test_verdict_word_of_several_tokens_is_refused():
    """Red if a verdict is read from half a word."""
    flags = ("--speculative-parse-verdict-tokens", "Quite/Hardly")
    with pytest.raises(ValueError, match="--speculative-parse-verdict-tokens"):
        resolve(*TARGET, *DRAFT, *flags)


def test_bad_file_of_the_environment_is_refused_before_loading(tmp_path, monkeypatch):
    """Red if a broken SGLANG_PARSE_CONFIG shows up only in the worker."""
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"treshold": 1}))
    monkeypatch.setenv(CONFIG_ENV, str(path))
    with pytest.raises(ValueError, match="treshold"):
        resolve(*TARGET, *DRAFT)
