"""`sglang-parse estimate`: how fast a pair would be on a card, by a closed formula.

A request alternates between judged rounds and, after a failed verdict, short rounds in
which the target rewrites the failed segment. The formula takes the expected tokens and
the time of both, for the best draft length. estimate.toml explains each constant.
"""

from __future__ import annotations

import argparse
import json
import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
CARDS: dict[str, dict[str, float]] = _TABLES["cards"]
MODELS: dict[str, list[Any]] = _TABLES["models"]
# Tokens of a segment, of a judge question, and of the draft that --kept is told of.
SEGMENT, QUESTION, KEPT_OF = 40, 24, 256
# Share of draft tokens that are the target's own.
AGREEMENT = 0.8
# Draft lengths: segments of a judged round, and tokens where a segment is rewritten.
SEGMENTS, REWRITE = range(1, 7), 8
# Milliseconds that the host takes between draft steps that check guesses: measured on
# one core of an idle CPU (benchmarks/gpu/guess_host.py), on no card.
GUESS_MS = 0.5
# Forwards of a head of the draft for each such step: it reads, and takes three steps.
HEAD_FORWARDS = 4
# Bytes of a card that SGLang leaves free (arg_groups/memory_hook.py).
RESERVED = 10 * 2**30


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with grouped-query attention; weights and KV are 16-bit.

    mlp_width: of one expert in a model with experts.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab: int
    experts: int
    experts_per_token: int
    is_tied: bool

    @classmethod
    def find(cls, name: str) -> ModelShape:
        """By a known name, a folder with a `config.json`, or that file. Raises
        ValueError."""
        path, short = Path(name), name.rpartition("/")[2].lower()
        for known, sizes in MODELS.items():
            if known.lower() == short and not path.exists():
                return cls(known, *sizes)
        file = path / "config.json" if path.is_dir() else path
        try:
            return cls.of(json.loads(file.read_text("utf-8")), path.name)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{name!r} is no decoder's config.json, no folder that holds one, and "
                f"none of {', '.join(MODELS)} ({type(error).__name__}: {error})."
            ) from error

    @classmethod
    def of(cls, config: dict[str, Any], name: str) -> ModelShape:
        """From a `config.json`. Raises LookupError or ValueError."""
        config = config.get("text_config") or config
        if config.get("kv_lora_rank"):
            raise ValueError("the estimate does not know latent attention")
        has = {key: value for key, value in config.items() if value is not None}
        hidden, heads = has["hidden_size"], has["num_attention_heads"]
        experts = has.get("num_experts", has.get("num_local_experts", 0))
        width = has["intermediate_size"]
        attention = (heads, has.get("num_key_value_heads", heads))
        head_dim = has.get("head_dim", hidden // heads)
        mlp_width = has.get("moe_intermediate_size", width) if experts else width
        used, is_tied = has.get("num_experts_per_tok", 0), "tie_word_embeddings"
        sizes = (has["num_hidden_layers"], hidden, *attention, head_dim, mlp_width)
        return cls(
            name, *sizes, has["vocab_size"], experts, used, has.get(is_tied, False)
        )

    @property
    def dense_params(self) -> float:
        """Parameters that every token reads: attention, dense MLPs, the LM head."""
        width = 2 * (self.heads + self.kv_heads) * self.head_dim
        width += 0 if self.experts else 3 * self.mlp_width
        return self.hidden * (self.layers * width + self.vocab)

    @property
    def expert_params(self) -> float:
        """Parameters of all experts together, 0 for a dense model."""
        return 3.0 * self.layers * self.hidden * self.mlp_width * self.experts

    def read_bytes(self, num_tokens: float) -> float:
        """Bytes of weights that a forward over this many tokens reads."""
        idle = 1 - self.experts_per_token / self.experts if self.experts else 1.0
        return 2 * (self.dense_params + (1 - idle**num_tokens) * self.expert_params)

    @property
    def weight_bytes(self) -> float:
        embedding = 0 if self.is_tied else self.vocab * self.hidden
        return 2 * (self.dense_params + self.expert_params + embedding)

    @property
    def kv_bytes(self) -> float:
        """KV bytes of a token."""
        return 2.0 * 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class PairTimes:
    """Milliseconds of the forwards of a target and its draft model on `tp` cards.

    card: a row of CARDS. context: tokens before each request's new ones. tokens_a_step:
    that the draft writes, more than one by guesses. by_head: whether a head guesses
    them, a layer of the draft's shape with its vocabulary.
    """

    target: ModelShape
    draft: ModelShape
    card: dict[str, float]
    tp: int = 1
    context: int = 2048
    tokens_a_step: float = 1.0
    by_head: bool = False

    def decode_ms(self, model: ModelShape, bs: int) -> float:
        """A captured decode step, one token a request."""
        layer = self._read_ms(model.read_bytes(bs)) / model.layers
        layer = max(self.card["layer_floor_ms"], layer + self._extra_ms(model))
        layer += self.card["all_reduce_ms"] if self.tp > 1 else 0.0
        return model.layers * layer + self._kv_ms(model, bs)

    def forward_ms(self, model: ModelShape, rows: float, bs: int) -> float:
        """A forward over `rows` tokens of bs requests."""
        card, tp = self.card, self.tp
        memory = self._read_ms(model.read_bytes(rows)) + self._kv_ms(model, bs)
        memory += self._extra_ms(model) * model.layers
        rate = card["moe_matmul_tflop"] if model.experts else card["matmul_tflop"]
        # A token multiplies and adds once for each parameter that it reads.
        work = rows * model.read_bytes(1) * 1e-12 / (rate * tp)
        scores = 4 * rows * self.context * model.layers * model.heads * model.head_dim
        attention = scores * 1e-12 / (card["attention_tflop"] * tp)
        moved = rows * model.hidden * 4e-9 / card["all_reduce_gb"]
        reduce = model.layers * (card["all_reduce_ms"] + moved) if tp > 1 else 0.0
        # Reading and computing hide each other only in part (docs/results/gpu.md).
        return math.hypot(memory, work) + card["pass_fixed_ms"] + attention + reduce

    def _extra_ms(self, model: ModelShape) -> float:
        """Of a layer, beside its bytes."""
        return self.card["moe_layer_extra_ms" if model.experts else "layer_extra_ms"]

    def _read_ms(self, num_bytes: float) -> float:
        return num_bytes / 1e9 / self.tp / self.card["bandwidth_gb"]

    def _kv_ms(self, model: ModelShape, bs: int) -> float:
        return self._read_ms(bs * self.context * model.kv_bytes)

    def round_ms(self, bs: int, steps: int, rows: float) -> float:
        """A round of `steps` draft tokens and one target pass over `rows` tokens."""
        card, guessed = self.card, self.tokens_a_step
        step = self.decode_ms(self.draft, bs) + card["step_extra_ms"]
        if guessed > 1:
            step += GUESS_MS
            if self.by_head:
                head = replace(self.draft, layers=1)
                step += HEAD_FORWARDS * self.decode_ms(head, bs)
            step /= guessed
        host = card["host_draft_ms"] + card["host_round_ms"] + card["host_between_ms"]
        host += card["host_request_ms"] * bs
        return steps * step + self.forward_ms(self.target, rows, bs) + host


class Speed(NamedTuple):
    """steps: of the draft model in a judged round. tokens, ms: of an average round."""

    ratio: float
    steps: int
    tokens: float
    ms: float


def speed(pair: PairTimes, bs: int, kept: float, segments: int) -> Speed:
    """Of bs requests whose drafts have so many segments."""
    steps = SEGMENT * segments
    # Errors are independent: valid[k] is the chance of none in the first k segments.
    valid = [math.exp(-error_rate(kept) * SEGMENT * k) for k in range(segments + 1)]
    tail = sum(AGREEMENT**k for k in range(1, SEGMENT))
    rewritten = 1 + sum(AGREEMENT**k for k in range(1, REWRITE + 1))
    # Rounds in which the failed segment is rewritten, for each judged round.
    rewrites = (1 - valid[-1]) * (SEGMENT - tail - 1) / rewritten
    tokens = SEGMENT * sum(valid[1:]) + (1 - valid[-1]) * tail + 1
    tokens = (tokens + rewrites * rewritten) / (1 + rewrites)
    share = rewrites / (1 + rewrites)
    judged, short = bs * (steps + 1 + segments * QUESTION), bs * (REWRITE + 1)
    mixed = judged if bs == 1 else (1 - share) * judged + share * short
    ms = pair.round_ms(bs, steps, mixed)
    # A round is short only where all requests rewrite.
    ms += share**bs * (pair.round_ms(bs, REWRITE, short) - ms)
    return Speed(tokens / ms * pair.decode_ms(pair.target, bs), steps, tokens, ms)


def error_rate(kept: float, window: int = KEPT_OF) -> float:
    """Errors a token, where a draft of `window` tokens with x errors on average is kept
    to the share (1 - exp(-x)) / x."""
    low, high = 1e-9, 1e4
    for _ in range(100 if kept < 1 else 0):
        x = math.sqrt(low * high)
        low, high = (x, high) if (1 - math.exp(-x)) / x > kept else (low, x)
    return low / window


def add_estimate(commands: Any) -> None:
    """Add the command to the subparsers."""
    p = commands.add_parser("estimate", help="estimate a pair's speed on a GPU")
    model = f"a config.json, its folder, or one of {', '.join(MODELS)}"
    p.add_argument("--target", required=True, metavar="MODEL", help=model)
    p.add_argument("--draft", required=True, metavar="MODEL", help="likewise")
    p.add_argument("--gpu", choices=CARDS, default="h200", help="default: h200")
    p.add_argument("--tp", type=int, choices=(1, 2, 4, 8), default=1, help="cards")
    kept = f"share of a draft of {KEPT_OF} tokens that judging keeps; default: 0.9"
    p.add_argument("--kept", type=float, default=0.9, metavar="X", help=kept)
    help = "requests at once; default: 1 8 32"
    p.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help=help)
    help = "that the draft writes, above 1 where it guesses; default: 1"
    p.add_argument("--tokens-a-step", type=float, default=1.0, metavar="X", help=help)
    help = "a head of the draft guesses these tokens, which takes time too"
    p.add_argument("--draft-head", action="store_true", help=help)
    p.set_defaults(command=estimate_command)


def estimate_command(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    if not 0 < args.kept <= 1:
        raise ValueError(f"--kept is {args.kept}; expected above 0 and at most 1.")
    if not 1 <= (guessed := args.tokens_a_step) < math.inf:
        raise ValueError(f"--tokens-a-step is {guessed}; expected 1 or more.")
    target, draft = ModelShape.find(args.target), ModelShape.find(args.draft)
    if args.draft_head and guessed == 1:
        raise ValueError(
            "--draft-head needs --tokens-a-step above 1, which it reaches."
        )
    guesses = {"tokens_a_step": guessed, "by_head": args.draft_head}
    pair = PairTimes(target, draft, CARDS[args.gpu], args.tp, **guesses)
    cards, most = f"{args.tp} x {args.gpu.upper()}", max(args.concurrency)
    weights = target.weight_bytes + draft.weight_bytes
    room = args.tp * (1e9 * pair.card["memory_gb"] - RESERVED) - weights
    tokens = max(0, int(room / (target.kv_bytes + draft.kv_bytes)))
    told = f"weights of {weights / 1e9:.0f} GB leave KV cache for {tokens:,} tokens"
    if tokens < most * pair.context:
        raise ValueError(
            f"On {cards} the {told}, but --concurrency {most} needs "
            f"{most * pair.context:,}; raise --tp or lower --concurrency."
        )
    table = Table(
        "requests at once",
        "draft tokens in a judged round",
        "target passes for 100 tokens",
        "ms for a round",
        "tokens/s of all requests",
        "speed over the target alone",
    )
    for bs in args.concurrency:
        best = max(speed(pair, bs, args.kept, n) for n in SEGMENTS)
        rate = 1000 * bs * best.tokens / best.ms
        cells = f"{bs} {best.steps} {100 / best.tokens:.1f} {best.ms:.0f} {rate:.0f}"
        table.add_row(*cells.split(), f"{best.ratio:.1f}x")
    console = Console(highlight=False)
    console.print(f"Estimate for {target.name} with {draft.name} on {cards}:", table)
    console.print(
        f"The {told}.\n"
        "In a judged round the draft model writes so many tokens, "
        f"{guessed:g} a step, and the target judges them in one pass.\n"
        f"Assumed: judging keeps {args.kept:.0%} of a draft of {KEPT_OF} tokens, "
        f"{AGREEMENT:.0%} of draft tokens are the target's own, a segment has "
        f"{SEGMENT} tokens and a judge question {QUESTION}, and weights are 16-bit.\n"
        "These are estimates from a formula. Its times are fitted to one H200; no H100 "
        "was measured. PARSE stops drafting where drafts do not pay."
    )
    return 0
