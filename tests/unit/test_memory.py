"""KV budget and rows: what PARSE tells SGLang, against what SGLang allocates."""

import json
from types import SimpleNamespace

import pytest
import torch

from sglang_parse import memory
from sglang_parse.algorithm import NUM_DRAFT_TOKENS
from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from sglang_parse.flags import OPTIONS_ATTRIBUTE
from sglang_parse.window import draft_window

pytestmark = pytest.mark.usefixtures("plugins")
DRAFT = json.loads((DRAFT_PATH / "config.json").read_text())


@pytest.fixture
def published(monkeypatch):
    """SGLang's published configuration as far as these functions read it."""
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache import allocation_sizing

    spec = SimpleNamespace(
        speculative_algorithm="PARSE",
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        speculative_draft_attention_backend=None,
        speculative_draft_kv_cache_dtype=None,
    )
    parallel = SimpleNamespace(attn_tp_size=1)
    model = SimpleNamespace(kv_cache_dtype="auto")
    for name, value in {"spec": spec, "parallel": parallel, "model": model}.items():
        monkeypatch.setattr(runtime_context, f"get_{name}", lambda v=value: v)
    monkeypatch.setattr(allocation_sizing, "get_spec", lambda: spec)
    monkeypatch.setattr(
        allocation_sizing, "max_speculative_num_draft_tokens", lambda: NUM_DRAFT_TOKENS
    )
    monkeypatch.setattr(allocation_sizing, "get_alloc_page_size", lambda: 1)
    return SimpleNamespace(spec=spec, parallel=parallel, model=model)


def server_args():
    from sglang.srt.server_args import prepare_server_args

    args = ["--model-path", str(TARGET_PATH), "--dtype", "float32"]
    args += ["--speculative-draft-model-path", str(DRAFT_PATH)]
    return prepare_server_args(args)


def cell_size() -> int:
    return memory.draft_cell_size(server_args(), str(DRAFT_PATH), None)


def pool_of_draft(dtype: torch.dtype, num_tokens: int = 50):
    """The pool SGLang allocates for the draft model."""
    from sglang_parse.cpu_ops import CpuMHATokenToKVPool

    return CpuMHATokenToKVPool(
        size=num_tokens,
        page_size=1,
        dtype=dtype,
        head_num=DRAFT["num_key_value_heads"],
        head_dim=DRAFT["head_dim"],
        layer_num=DRAFT["num_hidden_layers"],
        device="cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
    )


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
    assert budget == memory.bytes_per_token(pool_of_draft(dtype))


def test_budget_follows_the_target_kv_type_where_the_draft_names_none(published):
    """Red if --kv-cache-dtype halves the target's pool and not the draft's."""
    whole = cell_size()
    published.model.kv_cache_dtype = "bf16"
    assert cell_size() * 2 == whole


def test_only_target_pools_of_parse_servers_are_charged(published, monkeypatch):
    """Red if the draft's bytes are counted twice, or for other algorithms."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    monkeypatch.setattr(
        memory, "draft_cell_size", lambda _, path, __: 3 if path == "head" else 7
    )
    parse = SpeculativeAlgorithm.from_string("PARSE")
    args = server_args()

    def charged(**changes) -> int:
        fields = {"is_draft_worker": False, "spec_algorithm": parse}
        kvc = SimpleNamespace(**{**fields, "server_args": args, **changes})
        return memory.add_draft_cell_size(100, None, kvc)

    assert charged() == 107
    assert charged(is_draft_worker=True) == 100
    assert charged(spec_algorithm=SpeculativeAlgorithm.NONE) == 100
    alone = SimpleNamespace(
        speculative_draft_model_path=None, speculative_draft_model_revision=None
    )
    assert charged(server_args=alone) == 100
    head = {"compose": "eagle3", "eagle_model_path": "head"}
    setattr(alone, OPTIONS_ATTRIBUTE, head)
    assert charged(server_args=alone) == 103
    setattr(args, OPTIONS_ATTRIBUTE, head)
    assert charged() == 110


def test_largest_pass_has_a_slot_for_every_row():
    room = {"num_requests": 4, "max_judge_tokens": 48, "most": 1000}
    assert memory.full_pass_rows(window=101, **room) == 4 * 150
    assert memory.full_pass_rows(window=400, **room) == 1000
    assert memory.full_pass_rows(window=0, **room) == 1000


def test_features_of_a_prefill_must_fit():
    """Red if an EAGLE-3 head runs the device out of memory at the first prompt."""
    room = {"num_prefill": 8192, "num_verify": 9, "width": 3 * 4096, "itemsize": 2}
    wanted = 2 * 8192 * 3 * 4096 * 2
    memory.check_feature_room(**room, free_bytes=wanted)
    with pytest.raises(ValueError, match=r"0\.40 GB .* 8192 .*chunked-prefill-size"):
        memory.check_feature_room(**room, free_bytes=wanted - 1)


def test_features_of_a_full_pass_that_may_not_fit_are_told(caplog):
    """Red if the log says nothing before a crowded round runs out of memory."""
    room = {"num_prefill": 9, "num_verify": 8192, "width": 3 * 4096, "itemsize": 2}
    wanted = 2 * 8192 * 3 * 4096 * 2
    memory.check_feature_room(**room, free_bytes=wanted)
    assert not caplog.text
    memory.check_feature_room(**room, free_bytes=wanted - 1)
    assert "verify pass of 8192 tokens" in caplog.text
    assert "--max-running-requests" in caplog.text


@pytest.mark.parametrize("context_len", [64, 512])
def test_no_request_can_reach_past_its_row(published, context_len):
    """Red if the row SGLang makes is narrower than what PARSE or the scheduler may
    write: the writer runs on into the next request's row."""
    from sglang.srt.mem_cache.allocation_sizing import (
        get_alloc_reserve_per_decode,
        get_req_to_token_extra_context_len,
    )

    width = context_len + get_req_to_token_extra_context_len()
    for seq_len in range(1, context_len):
        for suffix_len in (0, 19):
            window = draft_window(
                0,
                num_remaining=10 * context_len,
                num_positions=context_len - seq_len - 1 - suffix_len,
            )
            assert seq_len + 1 + window <= width
        # The scheduler reserves behind what is committed, whatever PARSE did.
        assert seq_len + get_alloc_reserve_per_decode() <= width


@pytest.mark.parametrize(
    ("chunk", "returns_experts", "rows"),
    [(8192, False, 8192), (512, False, 2048), (512, True, 512), (-1, False, 16384)],
)
def test_a_pass_is_no_longer_than_memory_is_left_for(
    monkeypatch, chunk, returns_experts, rows
):
    """Red if a pass outgrows the activations of a prefill, or SGLang's buffer of routed
    experts, which has rows for a prefill alone."""
    schedule = SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=16384)
    features = SimpleNamespace(enable_return_routed_experts=returns_experts)
    execution = SimpleNamespace(features=features)
    monkeypatch.setattr(memory, "get_schedule", lambda: schedule)
    monkeypatch.setattr(memory, "get_exec", lambda: execution)
    assert memory.longest_pass() == rows


def test_row_that_is_too_short_is_noticed():
    """Red if a wrong length is written into the next request's row instead."""
    pool = SimpleNamespace(req_to_token=torch.zeros(3, 16, dtype=torch.int32))
    slots = memory.RoundSlots(pool, None, 2048)
    req = SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=10))
    with pytest.raises(AssertionError):
        slots.extend_rows(SimpleNamespace(reqs=[req]), [17])


def test_line_says_what_pools_hold_and_rounds_take(published):
    """Red if the start-up line loses a number an operator plans with."""
    pool = pool_of_draft(torch.float32, num_tokens=1000)
    size = memory.bytes_per_token(pool)
    line = memory.describe_pools(
        target_pool=pool, draft_pools=[pool, pool], window=256, max_judge_tokens=304
    )
    for number in (1000, size, 256, 304):
        assert str(number) in line
    assert f"{3 * 1000 * size / 1e9:.2f} GB" in line
    alone = memory.describe_pools(
        target_pool=pool, draft_pools=[], window=0, max_judge_tokens=0
    )
    assert "0 for what drafts" in alone and "whole response" in alone
