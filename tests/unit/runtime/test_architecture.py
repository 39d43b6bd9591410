"""Models that cannot be served are refused by name."""

from types import SimpleNamespace

import pytest
from sglang.srt.configs.model_config import AttentionArch

from sglang_parse.runtime import architecture

FLAGS = ["--model-path", "--speculative-draft-model-path"]


@pytest.fixture(autouse=True)
def no_recurrence(monkeypatch):
    monkeypatch.setattr(architecture, "mambaish_config", lambda _: None)


def runner(sliding_window_size=None, name="LlamaForCausalLM", **fields):
    values = {
        **{"is_multimodal": False, "is_hybrid_swa": False, "is_generation": True},
        **{"is_encoder_decoder": False, "attention_chunk_size": None},
        **{"attention_arch": AttentionArch.MHA},
        **fields,
    }
    hf = SimpleNamespace(architectures=[name])
    config = SimpleNamespace(hf_config=hf, **values)
    return SimpleNamespace(model_config=config, sliding_window_size=sliding_window_size)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"is_encoder_decoder": True}, "is an encoder-decoder"),
        ({"is_generation": False}, "does not generate"),
        ({"attention_chunk_size": 8192}, "attends within chunks"),
        ({"name": "DeepseekV32ForCausalLM"}, "sparse attention"),
        ({"name": "MiniMaxM3SparseForCausalLM"}, "block-sparse attention"),
        ({"name": "NobodysForCausalLM"}, "no family that PARSE knows"),
        ({"name": "Qwen3NextForCausalLM"}, "recurrent state"),
    ],
)
@pytest.mark.parametrize("flag", FLAGS)
def test_model_whose_kv_cannot_branch_is_refused(flag, fields, told):
    """Red if a target or draft whose KV cannot branch, or is unknown, is served."""
    name = fields.get("name", "LlamaForCausalLM")
    architecture.check_architecture(runner(), flag)
    with pytest.raises(ValueError, match=f"{flag}: {name} .*{told}"):
        architecture.check_architecture(runner(**fields), flag)


def test_recurrent_state_is_refused(monkeypatch):
    """Red if a mamba target is served: its state cannot be cut back."""
    monkeypatch.setattr(architecture, "mambaish_config", lambda _: object())
    with pytest.raises(ValueError, match="recurrent state"):
        architecture.check_architecture(runner(), "--model-path")


# Gemma 2 and 3 say of themselves that they are not hybrid.
@pytest.mark.parametrize(
    "fields",
    [{"sliding_window_size": 0}, {"sliding_window_size": 9}],
)
def test_windows_are_served_where_their_passes_are_right(fields):
    """Red if FlashInfer, which shows a verify row the whole context, gets windows."""
    model = runner(**fields)
    for backend in ("triton", "parse_torch", None):
        architecture.check_architecture(model, "--model-path", verify_backend=backend)
    with pytest.raises(ValueError, match="sliding windows.* flashinfer; expected"):
        architecture.check_architecture(
            model, "--model-path", verify_backend="flashinfer"
        )
    plain = runner(sliding_window_size=-1)
    architecture.check_architecture(plain, "--model-path", verify_backend="flashinfer")


def test_pool_of_windows_is_refused_on_a_gpu():
    """Red if a draft is served beside pools that take all memory."""
    model = runner(is_hybrid_swa=True, sliding_window_size=9)
    architecture.check_architecture(model, "--model-path", verify_backend="parse_torch")
    with pytest.raises(ValueError, match="--disable-hybrid-swa-memory"):
        architecture.check_architecture(model, "--model-path", verify_backend="triton")


def test_latent_attention_is_served_where_its_passes_are_right():
    """Red if a backend that nobody checked gets latent KV."""
    model = runner(attention_arch=AttentionArch.MLA)
    architecture.check_architecture(model, "--model-path", verify_backend="parse_torch")
    for backend in ("triton", "flashinfer"):
        with pytest.raises(ValueError, match=f"latent attention.* {backend}; expected"):
            architecture.check_architecture(
                model, "--model-path", verify_backend=backend
            )


def test_head_beside_a_multimodal_target_is_refused():
    """Red if a head is shown the placeholders of an image as tokens."""
    model = runner(is_multimodal=True)
    architecture.check_architecture(model, "--model-path")
    with pytest.raises(ValueError, match="EAGLE-3 head cannot read images"):
        architecture.check_architecture(model, "--model-path", has_head=True)
