"""What PARSE adds to SGLang's KV budget, against what SGLang allocates."""

from types import SimpleNamespace

import pytest
import torch

from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from sglang_parse.plugin import kv_budget
from sglang_parse.plugin.flags import OPTIONS_ATTRIBUTE
from sglang_parse.sgl.capacity import bytes_per_token
from tests.support import tiny_mtp
from tests.support.kv_pools import pool_of_draft

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.fixture
def published(monkeypatch):
    """SGLang's published configuration as far as these functions read it."""
    spec = SimpleNamespace(
        speculative_draft_attention_backend=None,
        speculative_draft_kv_cache_dtype=None,
    )
    parallel = SimpleNamespace(attn_tp_size=1)
    model = SimpleNamespace(kv_cache_dtype="auto")
    for name, value in {"spec": spec, "parallel": parallel, "model": model}.items():
        monkeypatch.setattr(kv_budget, f"get_{name}", lambda v=value: v)
    return SimpleNamespace(spec=spec, parallel=parallel, model=model)


def server_args():
    from sglang.srt.server_args import prepare_server_args

    args = ["--model-path", str(TARGET_PATH), "--dtype", "float32"]
    args += ["--speculative-draft-model-path", str(DRAFT_PATH)]
    return prepare_server_args(args)


def cell_size() -> int:
    args = server_args()
    return kv_budget.draft_cell_size(args, str(DRAFT_PATH), None, is_head=False)


@pytest.mark.parametrize(
    ("flag", "dtype"),
    [
        (None, torch.float32),
        ("bf16", torch.bfloat16),
        ("fp8_e4m3", torch.float8_e4m3fn),
    ],
)
def test_budget_of_draft_is_what_its_pool_takes(published, flag, dtype):
    """Red if the draft's pool is not budgeted to the byte: memory runs out later."""
    published.spec.speculative_draft_kv_cache_dtype = flag
    budget = cell_size()
    assert budget == bytes_per_token(pool_of_draft(dtype))


def test_budget_follows_the_target_kv_type_where_the_draft_names_none(published):
    """Red if --kv-cache-dtype halves the target's pool and not the draft's."""
    whole = cell_size()
    published.model.kv_cache_dtype = "bf16"
    assert cell_size() * 2 == whole


def test_only_target_pools_are_charged(published, monkeypatch):
    """Red if the draft's bytes are counted twice."""

    def size(args, path, revision, *, is_head):
        assert is_head or path == str(DRAFT_PATH)
        return 3 if path == "head" else 7 if not is_head else 9

    monkeypatch.setattr(kv_budget, "draft_cell_size", size)
    args = server_args()

    def charged(**changes) -> int:
        fields = {"is_draft_worker": False}
        kvc = SimpleNamespace(**{**fields, "server_args": args, **changes})
        return kv_budget.add_draft_cell_size(100, None, kvc)

    assert charged() == 107
    assert charged(is_draft_worker=True) == 100
    alone = SimpleNamespace(
        speculative_draft_model_path=None, speculative_draft_model_revision=None
    )
    assert charged(server_args=alone) == 100
    head = {"compose": "eagle3", "eagle_model_path": "head"}
    setattr(alone, OPTIONS_ATTRIBUTE, head)
    assert charged(server_args=alone) == 103
    setattr(args, OPTIONS_ATTRIBUTE, head)
    assert charged() == 110
    for option in ("compose", "draft_compose"):
        setattr(args, OPTIONS_ATTRIBUTE, {option: "mtp"})
        assert charged() == 116
    of_draft = {"draft_compose": "eagle3", "draft_eagle_model_path": "head"}
    setattr(args, OPTIONS_ATTRIBUTE, of_draft)
    assert charged() == 110


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_budget_of_an_mtp_head_is_one_layer(published, tmp_path, name):
    """Red if a head in a model's checkpoint is charged for the model's layers, a draft
    with such a head for that alone, or latent KV for keys and values of every head."""
    from sglang.srt.server_args import prepare_server_args

    path = tmp_path / name
    tiny_mtp.build_with_mtp(name, path)
    args = prepare_server_args(["--model-path", str(path), "--dtype", "float32"])
    fields = tiny_mtp.FAMILIES[name].fields
    width = 2 * fields["num_key_value_heads"] * fields["head_dim"]
    if "kv_lora_rank" in fields:
        width = fields["kv_lora_rank"] + fields["qk_rope_head_dim"]
    for is_head, layers in ((True, 1), (False, fields["num_hidden_layers"])):
        found = kv_budget.draft_cell_size(args, str(path), None, is_head=is_head)
        assert found == layers * 4 * width
