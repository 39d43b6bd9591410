"""The EAGLE-3 head: its unroll in training is what a server computes step by step."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.train_pair.export import export_head, head_state_dict, load_head
from benchmarks.train_pair.head import Eagle3Head, target_states
from benchmarks.train_pair.model import ModelConfig, TinyLlama, rms_norm, rotate
from benchmarks.train_pair.train_head import (
    HeadBatch,
    accept_length,
    accepted,
    head_batches,
)
from sglang_parse.embedded import HEAD_PATH, TARGET_PATH

VOCAB, DIM = 64, 128


@pytest.fixture(scope="module")
def target() -> TinyLlama:
    torch.manual_seed(0)
    return TinyLlama(ModelConfig(VOCAB, 8))


@pytest.fixture(scope="module")
def head(target) -> Eagle3Head:
    head = Eagle3Head(target)
    with torch.no_grad():
        for p in (head.norm1, head.norm2, head.hidden_norm, head.norm):
            p.add_(0.1 * torch.randn_like(p))
    return head


@pytest.fixture(scope="module")
def text(target) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (2, 12))
    return ids, target_states(target, ids)[0]


def serve(weights: dict[str, Tensor], ids, features, last: int, steps: int):
    """Hidden before the last norm: row `last`, then each draft step, with a KV cache.

    Written from SGLang's llama_eagle3.py, on the exported names; one sequence.
    """
    w = {k.removesuffix(".weight"): v for k, v in weights.items()}
    keys, values, out = [], [], []
    hidden = features @ w["fc"].T
    for position in range(last + steps):
        x = hidden[position] if position <= last else out[-1]
        embed = rms_norm(w["embed"][ids[position + 1]], w["midlayer.input_layernorm"])
        both = torch.cat((embed, rms_norm(x, w["midlayer.hidden_norm"])))
        q, k, v = (
            (w[f"midlayer.self_attn.{name}_proj"] @ both).view(2, 64) for name in "qkv"
        )
        angle = position * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
        keys.append(rotate(k, angle.cos(), angle.sin()))
        values.append(v)
        q = rotate(q, angle.cos(), angle.sin())
        probs = torch.einsum("hd,thd->ht", q, torch.stack(keys)).div(8).softmax(-1)
        attn = torch.einsum("ht,thd->hd", probs, torch.stack(values)).flatten()
        x = x + w["midlayer.self_attn.o_proj"] @ attn
        normed = rms_norm(x, w["midlayer.post_attention_layernorm"])
        gate = F.silu(w["midlayer.mlp.gate_proj"] @ normed)
        x = x + w["midlayer.mlp.down_proj"] @ (
            gate * (w["midlayer.mlp.up_proj"] @ normed)
        )
        if position >= last:
            out.append(x)
    return out


@torch.no_grad()
@pytest.mark.parametrize("base", [0, 3, 6])
def test_unroll_is_step_by_step_drafting(head, text, base):
    """Red if a draft step sees a key, a position or a hidden that no server has."""
    ids, features = text
    weights = head_state_dict(head) | {"embed.weight": head.embed}
    unrolled = list(head.unroll(ids, features, 5))
    for row in range(2):
        served = serve(weights, ids[row], features[row], base, 5)
        for step, hidden in enumerate(served):
            torch.testing.assert_close(
                unrolled[step][row, base + step], hidden, atol=1e-4, rtol=1e-4
            )


@torch.no_grad()
def test_rows_before_the_start_are_only_keys(head, text):
    ids, features = text
    whole, late = (list(head.unroll(ids, features, 4, start)) for start in (0, 5))
    for step in range(4):
        rows = slice(5 + step, 11)  # chains that begin at row 5 or later
        torch.testing.assert_close(whole[step][:, rows], late[step][:, step:6])


def test_features_are_the_inputs_of_sglangs_layers(target):
    """[2, L // 2, L - 3]; the first two layers, alone, end in the first feature."""
    ids = torch.randint(VOCAB, (1, 5))
    features, hidden = target_states(target, ids)
    assert features.shape == (1, 5, 3 * DIM) and hidden.shape == (1, 5, DIM)
    short = TinyLlama(ModelConfig(VOCAB, 2))
    weights = {
        k: v[:2] if k in TinyLlama.STACKED else v
        for k, v in target.state_dict().items()
    }
    short.load_state_dict(weights | {"norm": torch.ones(DIM)})
    mask = torch.full((5, 5), -1e4).triu(1)
    with torch.no_grad():
        expected, _ = short(ids, torch.arange(5)[None], mask, torch.float32)
    first = features[..., :DIM]
    torch.testing.assert_close(rms_norm(first, torch.ones(DIM)), expected)


def test_export_round_trip(head, target, tmp_path):
    tokenizer = SimpleNamespace(eos_token_id=2, pad_token_id=0)
    export_head(head, tokenizer, tmp_path)
    again = load_head(tmp_path, target)
    for (name, a), (_, b) in zip(
        head.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


class Param:
    """Stands for a parameter of SGLang's model, and keeps what is loaded into it."""

    def __init__(self) -> None:
        self.got: dict[object, tuple[int, ...]] = {}

    def weight_loader(self, _, loaded: Tensor, shard=None) -> None:
        self.got[shard] = tuple(loaded.shape)


LAYER = "model.layers.0."
EXPECTED = {
    "model.fc.weight": {None: (128, 384)},
    "model.norm.weight": {None: (128,)},
    "lm_head.weight": {None: (640, 128)},
    f"{LAYER}input_layernorm.weight": {None: (128,)},
    f"{LAYER}hidden_norm.weight": {None: (128,)},
    f"{LAYER}post_attention_layernorm.weight": {None: (128,)},
    f"{LAYER}self_attn.qkv_proj.weight": dict.fromkeys("qkv", (128, 256)),
    f"{LAYER}self_attn.o_proj.weight": {None: (128, 128)},
    f"{LAYER}mlp.gate_up_proj.weight": dict.fromkeys((0, 1), (256, 128)),
    f"{LAYER}mlp.down_proj.weight": {None: (128, 256)},
}


def test_sglang_loads_every_shipped_weight():
    """Red if a name of the shipped head is not one that SGLang's class maps."""
    eagle = pytest.importorskip("sglang.srt.models.llama_eagle3")
    params = {name: Param() for name in EXPECTED}
    model = SimpleNamespace(named_parameters=lambda: params.items())
    weights = load_file(HEAD_PATH / "model.safetensors")
    eagle.LlamaForCausalLMEagle3.load_weights(model, weights.items())
    assert {name: p.got for name, p in params.items()} == EXPECTED
    assert sum(len(p.got) for p in params.values()) == len(weights)
    assert {w.dtype for w in weights.values()} == {torch.float32}


def test_shipped_config_fits_the_target():
    head, target = (
        json.loads((path / "config.json").read_text())
        for path in (HEAD_PATH, TARGET_PATH)
    )
    changed = {"architectures", "num_hidden_layers", "draft_vocab_size"}
    assert {k for k in head if head.get(k) != target.get(k)} == changed
    assert head["architectures"] == ["LlamaForCausalLMEagle3"]
    assert head["draft_vocab_size"] == target["vocab_size"]


class Oracle:
    """Drafts right but for the tokens at the positions in `wrong`."""

    def __init__(self, wrong: set[int]) -> None:
        self.wrong = wrong

    def unroll(self, ids, features, depth, start=0):
        wanted = ids.roll(-2, 1).clone()
        for position in self.wrong:
            wanted[:, position - 2] = 0
        for _ in range(depth):
            yield F.one_hot(wanted, VOCAB)[:, start:].float()

    def guess(self, hidden):
        return hidden.argmax(-1)


def test_accept_length_counts_chains(target):
    """Prompt 0..4, own text 5..16: 5 is given, 11 tokens are left to draft."""
    texts = [(list(range(20, 25)), list(range(30, 42)))]
    batches = head_batches(target, texts, 50, torch.float32)
    perfect = accept_length(Oracle(set()), batches)
    assert (perfect["rounds"], perfect["tokens"]) == (3, 11)
    never = accept_length(Oracle(set(range(5, 17))), batches)
    assert (never["rounds"], never["accept_length"]) == (11, 1.0)
    once = accept_length(Oracle({8}), batches)  # 6 7 (8) | 9..12 (13) | 14..16
    assert (once["rounds"], once["accept_rate_1"]) == (3, 1.0)


def test_accepted_stops_at_the_first_wrong_token():
    ids = torch.arange(30, 42)[None]
    batch = HeadBatch(ids, None, None, torch.tensor([3]), torch.tensor([12]))
    counts = accepted(Oracle({8}), batch, 4)  # rows from 2 on; row i drafts i + 2
    assert counts.tolist() == [[4, 3, 2, 1, 0, 3, 2, 1, 0, 0]]
