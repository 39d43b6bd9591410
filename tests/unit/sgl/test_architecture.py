"""Models that cannot be served are refused by name."""

from types import SimpleNamespace

import pytest
from sglang.srt.configs.model_config import AttentionArch

from sglang_parse.sgl.architecture import check_architecture

TARGET, DRAFT = "--model-path", "--speculative-draft-model-path"
WINDOWS = {"sliding_window_size": 9}
POOL = {"is_hybrid_swa": True, **WINDOWS}
LATENT = {"attention_arch": AttentionArch.MLA}
SPARSE = {"name": "DeepseekV32ForCausalLM", **LATENT}
CPU, DSA = ["parse_torch"], ["dsa"]


@pytest.fixture
def runner():
    """Makes a runner."""

    def make(*, sliding_window_size=None, name="LlamaForCausalLM", **fields):
        of_runner = {k: fields.pop(k) for k in list(fields) if k in ("page_size",)}
        values = {
            **{"is_multimodal": False, "is_hybrid_swa": False, "is_generation": True},
            **{"is_encoder_decoder": False, "attention_chunk_size": None},
            **{"attention_arch": AttentionArch.MHA},
            **fields,
        }
        hf = SimpleNamespace(architectures=[name])
        config = SimpleNamespace(hf_config=hf, **values)
        return SimpleNamespace(
            model_config=config, sliding_window_size=sliding_window_size, **of_runner
        )

    return make


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"is_encoder_decoder": True}, "is an encoder-decoder"),
        ({"is_generation": False}, "does not generate"),
        ({"attention_chunk_size": 8192}, "attends within chunks"),
        ({"name": "HYV4ForCausalLM"}, "sparse attention"),
        ({"name": "MiniMaxM3SparseForCausalLM"}, "block-sparse attention"),
        ({"name": "NobodysForCausalLM"}, "no family that PARSE knows"),
        ({"name": "KimiLinearForCausalLM"}, "recurrent state"),
    ],
)
@pytest.mark.parametrize("flag", [TARGET, DRAFT])
def test_model_whose_kv_cannot_branch_is_refused(runner, flag, fields, told):
    """Red if a target or draft whose KV cannot branch, or is unknown, is served."""
    name = fields.get("name", "LlamaForCausalLM")
    with pytest.raises(ValueError, match=rf"{flag}: {name} .*{told}.*\.$"):
        check_architecture(runner(**fields), flag)


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({}, {}),
        # Gemma 2 and 3 say of themselves that they are not hybrid.
        ({"sliding_window_size": 0}, {"backends": ["triton", "parse_torch", "fa3"]}),
        (WINDOWS, {"backends": ["triton", "parse_torch", "fa3"]}),
        (WINDOWS, {}),
        ({"sliding_window_size": -1}, {"backends": ["flashinfer"]}),
        (POOL, {"backends": CPU}),
        (LATENT, {"backends": ["parse_torch", "triton", "flashinfer"]}),
        (LATENT, {"backends": ["triton"], "head": "eagle3"}),
        (SPARSE, {"backends": DSA}),
        ({"is_multimodal": True}, {}),
    ],
)
def test_target_is_served_where_its_passes_are_right(runner, fields, more):
    """Red if a target that can be served is refused."""
    check_architecture(runner(**fields), TARGET, **more)


@pytest.mark.parametrize(
    ("fields", "more", "told"),
    [
        (WINDOWS, {"backends": ["flashinfer"]}, "windows.* flashinfer; expected"),
        (POOL, {"backends": ["triton"]}, "--disable-hybrid-swa-memory"),
        (POOL | {"page_size": 16}, {"backends": CPU}, "add --page-size 1"),
        (LATENT, {"backends": ["fa3"]}, "latent attention.* fa3; expected"),
        (LATENT, {"backends": ["torch_native"]}, "latent.* torch_native; expected"),
        (LATENT, {"backends": ["flashinfer"], "head": "eagle3"}, "cannot serve with"),
        (LATENT, {"backends": ["flashinfer"], "head": "mtp"}, "cannot serve with"),
        (SPARSE, {"backends": ["triton"]}, "served on .* triton; expected dsa"),
        ({}, {"backends": DSA}, "served on .* dsa; expected another"),
        (LATENT, {"backends": DSA}, "served on .* dsa; expected another"),
        (SPARSE, {"backends": DSA, "head": "mtp"}, "sparse .*leave out .*compose mtp"),
        (SPARSE, {"backends": DSA, "brings_back": True}, "sparse .*hierarchical"),
        (SPARSE, {"backends": CPU, "is_draft": True}, "expected another draft model"),
        (WINDOWS, {"brings_back": True}, "--enable-hierarchical-cache"),
        ({"is_multimodal": True}, {"head": "eagle3"}, "read images; .*compose eagle3"),
        pytest.param(
            *({"is_multimodal": True}, {"head": "mtp"}, "read images; .*compose mtp"),
            marks=pytest.mark.refuses("images", "head"),
        ),
    ],
)
def test_target_is_refused_where_its_passes_would_be_wrong(runner, fields, more, told):
    """Red if a backend that would read the wrong KV, or that nobody checked, gets a
    model, or if one serves beside what reads its hidden states elsewhere."""
    with pytest.raises(ValueError, match=f"{TARGET}: .*{told}"):
        check_architecture(runner(**fields), TARGET, **more)


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [(WINDOWS, "flashinfer", "torch_native"), (LATENT, "triton", "flashinfer")],
)
def test_drafts_run_where_their_own_forwards_are_right(runner, fields, right, wrong):
    """Red if a draft is served by a backend that ignores its windows, or one whose
    prefills of latent KV nobody checked."""
    check_architecture(runner(**fields), DRAFT, backends=[right], is_draft=True)
    with pytest.raises(ValueError, match=f"{DRAFT}: .* {wrong}; expected"):
        check_architecture(runner(**fields), DRAFT, backends=[wrong], is_draft=True)


@pytest.mark.parametrize("name", ["Glm4MoeForCausalLMNextN", "LlamaForCausalLMEagle3"])
def test_a_head_serves_as_a_head_alone(runner, name):
    """Red if a draft that SGLang takes for a head fails at its first token."""
    check_architecture(runner(name=name), "--flag", is_draft=True, is_head=True)
    for is_draft in (True, False):
        with pytest.raises(ValueError, match=f"--flag: .* as {name}, the head of a"):
            check_architecture(runner(name=name), "--flag", is_draft=is_draft)
