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
        ({"name": "KimiLinearForCausalLM"}, "recurrent state"),
    ],
)
@pytest.mark.parametrize("flag", FLAGS)
def test_model_whose_kv_cannot_branch_is_refused(flag, fields, told):
    """Red if a target or draft whose KV cannot branch, or is unknown, is served."""
    name = fields.get("name", "LlamaForCausalLM")
    architecture.check_architecture(runner(), flag)
    with pytest.raises(ValueError, match=f"{flag}: {name} .*{told}"):
        architecture.check_architecture(runner(**fields), flag)


@pytest.fixture
def gated_delta(monkeypatch):
    """A model whose state is that of gated delta nets."""
    for name in ("mambaish_config", "hybrid_gdn_config"):
        monkeypatch.setattr(architecture, name, lambda _: object())
    return runner(name="Qwen3NextForCausalLM")


def test_other_recurrent_states_are_refused(monkeypatch):
    """Red if a mamba target of a served family is served: its state cannot branch."""
    monkeypatch.setattr(architecture, "mambaish_config", lambda _: object())
    monkeypatch.setattr(architecture, "hybrid_gdn_config", lambda _: None)
    with pytest.raises(ValueError, match="recurrent state other than"):
        architecture.check_architecture(runner(), "--model-path")


def test_gated_delta_nets_are_served_where_their_passes_are_right(gated_delta):
    """Red if SGLang's own backend verifies them: its passes have one width."""
    known = {"backends": ["parse_torch"]}
    architecture.check_architecture(gated_delta, "--model-path", **known)
    for backend in ("triton", "flashinfer"):
        with pytest.raises(ValueError, match=f"recurrent state.* {backend}; expected"):
            architecture.check_architecture(
                gated_delta, "--model-path", backends=[backend]
            )


@pytest.mark.parametrize(
    ("reader", "told"),
    [
        ({"head": "eagle3"}, "compose eagle3"),
        ({"has_probe": True}, "--speculative-parse-probe"),
    ],
)
def test_nobody_reads_beside_a_recurrent_state(gated_delta, reader, told):
    """Red if an EAGLE-3 head or a probe is served whose forwards begin elsewhere, or
    the head that such models ship is not."""
    known = {"backends": ["parse_torch"]}
    architecture.check_architecture(gated_delta, "--model-path", head="mtp", **known)
    with pytest.raises(ValueError, match=f"recurrent state, from which .*{told}"):
        architecture.check_architecture(gated_delta, "--model-path", **known, **reader)


def test_an_mtp_head_keeps_no_state(gated_delta):
    """Red if the head of such a target is taken for another one with a state."""
    name = "Qwen3NextForCausalLMMTP"
    gated_delta.model_config.hf_config.architectures = [name]
    gated_delta.is_draft_worker = True
    architecture.check_architecture(
        gated_delta, "--flag", backends=["triton"], is_draft=True, is_head=True
    )


@pytest.mark.parametrize("name", ["Glm4MoeForCausalLMNextN", "LlamaForCausalLMEagle3"])
def test_a_head_serves_as_a_head_alone(name):
    """Red if a draft that SGLang takes for a head fails at its first token."""
    head = runner(name=name)
    architecture.check_architecture(head, "--flag", is_draft=True, is_head=True)
    for is_draft in (True, False):
        with pytest.raises(ValueError, match=f"--flag: .* as {name}, the head of a"):
            architecture.check_architecture(head, "--flag", is_draft=is_draft)


# Gemma 2 and 3 say of themselves that they are not hybrid.
@pytest.mark.parametrize(
    "fields",
    [{"sliding_window_size": 0}, {"sliding_window_size": 9}],
)
def test_windows_are_served_where_their_passes_are_right(fields):
    """Red if FlashInfer, which shows a verify row the whole context, gets windows."""
    model = runner(**fields)
    for backends in (("triton", "parse_torch", "fa3"), ()):
        architecture.check_architecture(model, "--model-path", backends=backends)
    with pytest.raises(ValueError, match="sliding windows.* flashinfer; expected"):
        architecture.check_architecture(model, "--model-path", backends=["flashinfer"])
    plain = runner(sliding_window_size=-1)
    architecture.check_architecture(plain, "--model-path", backends=["flashinfer"])


def test_pool_of_windows_is_refused_on_a_gpu():
    """Red if a draft is served beside pools that take all memory."""
    model = runner(is_hybrid_swa=True, sliding_window_size=9)
    architecture.check_architecture(model, "--model-path", backends=["parse_torch"])
    with pytest.raises(ValueError, match="--disable-hybrid-swa-memory"):
        architecture.check_architecture(model, "--model-path", backends=["triton"])
    model.page_size = 16
    with pytest.raises(ValueError, match="add --page-size 1"):
        architecture.check_architecture(model, "--model-path", backends=["parse_torch"])


def test_latent_attention_is_served_where_its_passes_are_right():
    """Red if a backend that nobody checked gets latent KV."""
    model = runner(attention_arch=AttentionArch.MLA)
    architecture.check_architecture(model, "--model-path", backends=["parse_torch"])
    for backend in ("triton", "flashinfer"):
        architecture.check_architecture(model, "--model-path", backends=[backend])
    for backend in ("fa3", "torch_native"):
        with pytest.raises(ValueError, match=f"latent attention.* {backend}; expected"):
            architecture.check_architecture(model, "--model-path", backends=[backend])
    for more in ({"route": "mask"}, {"head": "eagle3"}, {"head": "mtp"}):
        architecture.check_architecture(
            model, "--model-path", backends=["triton"], **more
        )
        with pytest.raises(ValueError, match="cannot serve with --speculative-parse"):
            architecture.check_architecture(
                model, "--model-path", backends=["flashinfer"], **more
            )


def test_drafts_run_where_their_own_forwards_are_right():
    """Red if a draft is served by a backend that ignores its windows, or one whose
    prefills of latent KV nobody checked."""
    flag = "--speculative-draft-model-path"
    windows = runner(sliding_window_size=9)
    latent = runner(attention_arch=AttentionArch.MLA)
    for model, wrong in ((windows, "torch_native"), (latent, "flashinfer")):
        architecture.check_architecture(model, flag, backends=["triton"], is_draft=True)
        with pytest.raises(ValueError, match=f"{flag}: .* {wrong}; expected"):
            architecture.check_architecture(
                model, flag, backends=[wrong], is_draft=True
            )
    architecture.check_architecture(
        windows, flag, backends=["flashinfer"], is_draft=True
    )


def test_head_beside_a_multimodal_target_is_refused():
    """Red if a head is shown the placeholders of an image as tokens."""
    model = runner(is_multimodal=True)
    architecture.check_architecture(model, "--model-path")
    for head in ("eagle3", "mtp"):
        with pytest.raises(ValueError, match=f"cannot read images; .*compose {head}"):
            architecture.check_architecture(model, "--model-path", head=head)
