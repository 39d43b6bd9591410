"""A target, drafters and slots that take virtual time and write made-up tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks.simulate.clock import Clock
from benchmarks.simulate.costs import Costs
from benchmarks.simulate.drafts import (
    AGREES,
    DIFFERS,
    STOP,
    TARGETS_OWN,
    WRONG,
    Drafts,
)
from sglang_parse.cli.estimate import GUESS_MS
from sglang_parse.drafting.draft_model import MOST_LEAD
from sglang_parse.drafting.drafter import room_for
from sglang_parse.drafting.lanes import DraftPhase, DraftRequest, Lane, Lanes
from sglang_parse.drafting.spans import read_ends
from sglang_parse.requests.draft import ChainCuts
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.verify.layout import VerifyPlan

# Most tokens that the draft model reads in one forward: a prefill's.
LONGEST_EXTEND = 8192
# Logits of a verdict for an invalid and for a valid prefix: ids 0 and 1 are yes and no.
LOGITS = torch.tensor([[0.0, 8.0], [8.0, 0.0]])
VERDICT_IDS = ((0, 1),)


def answer_of(r: RequestRound) -> Answer:
    """The simulated answer that stands in for SGLang's request."""
    return cast(Answer, r.req)


@dataclass(eq=False)
class Answer:
    """A simulated request; stands for SGLang's, of which rounds read a few fields.

    segment_ends: output positions whose token ends a segment. is_hard: whether drafts
    are wrong more often here.
    """

    length: int
    prompt_len: int
    segment_ends: frozenset[int]
    rng: random.Random
    arrived_ms: float = 0.0
    is_hard: bool = False
    #: When it was given its last tokens.
    last_ms: float = 0.0
    num_passes: int = 0
    output_ids: list[int] = field(default_factory=list)
    origin_input_ids: tuple[int, ...] = ()
    grammar: Any = None
    #: Positions that the draft model has forwarded, of prompt and output.
    num_cached: int = 0
    num_head_cached: int = 0

    def __post_init__(self) -> None:
        self.sampling_params = SimpleNamespace(
            max_new_tokens=self.length + 64, stop_strs=None, stop_regex_strs=None
        )
        self.kv = SimpleNamespace(kv_allocated_len=0)

    @property
    def seq_len(self) -> int:
        """Tokens before the bonus token."""
        return self.prompt_len + len(self.output_ids) - 1

    @property
    def is_done(self) -> bool:
        return len(self.output_ids) >= self.length

    def token(self, position: int, kind: int) -> int:
        """The token of a kind at a place of the output; the last one ends it."""
        if position >= self.length - 1:
            return STOP
        return 2 * kind + (position in self.segment_ends)


class FakeTarget:
    """Agrees with draft tokens as their kind says, and judges by their errors.

    overlaps: whether Python runs while the device computes, as in stock SGLang.
    """

    def __init__(self, costs: Costs, clock: Clock, *, overlaps: bool = False) -> None:
        self.costs = costs
        self.clock = clock
        self.plain_host_ms = 0.0 if overlaps else costs.plain_host_ms

    def verify(self, round: Round, plan: VerifyPlan) -> Any:
        bs, rows = len(round), plan.num_verify_tokens
        asks = any(r.boundaries for r in round)
        ms = self.costs.pass_ms(rows, bs, asks=asks)
        self.clock.spend("pass", ms, kernel=("pass", bs.bit_length()))
        self.clock.spend("host", self.costs.host_ms(bs))
        verdicts = [valid for r in round for valid in self.verdicts(r)]
        for r in round:
            answer_of(r).num_passes += 1
        return SimpleNamespace(logits=LOGITS[verdicts])

    def verdicts(self, r: RequestRound) -> list[int]:
        """1 for each boundary before which no draft token is wrong."""
        kinds = [t // 2 for t in r.draft.tokens]
        first = kinds.index(WRONG) if WRONG in kinds else len(kinds)
        return [int(b <= first) for b in r.boundaries]

    def decode(
        self, round: Round, go_on: Callable[[list[list[int]], int], bool]
    ) -> list[list[int]]:
        bs = len(round)
        kernel = ("plain", bs.bit_length())
        steps: list[list[int]] = []
        self.clock.spend("host", self.plain_host_ms)
        # A device is at the last step when the next one is launched.
        while not steps or (
            len(steps) < round.num_steps and go_on(steps[:-1], len(steps))
        ):
            self.clock.spend("plain", self.costs.plain_ms(bs), kernel)
            done = len(steps)
            places = [(answer_of(r), r.output_len + done) for r in round]
            steps.append([answer.token(at, TARGETS_OWN) for answer, at in places])
        for r in round:
            answer_of(r).num_passes += len(steps)
        return steps

    def keep(self, round: Round) -> None:
        return None

    def sample(
        self, round: Round, owner: Sequence[int], offset: Sequence[int]
    ) -> tuple[list[int], Any]:
        tokens = []
        for i, j in zip(owner, offset, strict=True):
            r = round.requests[i]
            drafted = r.draft.tokens[j : j + 1]
            if drafted and drafted[0] // 2 == AGREES and drafted[0] != STOP:
                tokens.append(drafted[0])
            else:
                tokens.append(answer_of(r).token(r.output_len + j, TARGETS_OWN))
        return tokens, None

    def join_samples(self, samples: Sequence[Any]) -> Any:
        return None

    def prefill(self, batch: Any, *, needed: bool) -> Any:
        raise NotImplementedError("The simulator computes prompts without a batch.")


class FakeSlots:
    """A pool that is never full."""

    page_size = 1

    def __init__(self, max_rows: int = 8192, num_slots: int = 1 << 20) -> None:
        self.max_rows = max_rows
        self.num_slots = num_slots

    def num_free(self, tree_cache: Any, num_rows: int = 0) -> int:
        return self.num_slots

    def extend_rows(self, batch: Any, lens: Sequence[int]) -> None:
        """There is always room."""

    def trim_rows(self, batch: Any, lens: Sequence[int]) -> None:
        """Nothing is held."""


class OneRank:
    """No other rank has to agree."""

    def agree(self, value: int) -> int:
        return value

    def agree_all(self, lists: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in lists]


class FakeDrafter:
    """Writes made-up tokens. quality: what drafts are like now."""

    reads_features = False
    runners: Sequence[Any] = ()

    def __init__(
        self,
        name: str,
        costs: Costs,
        clock: Clock,
        quality: Callable[[], Drafts],
        max_tokens: int = 0,
    ) -> None:
        self.name = name
        self.token_level = max_tokens > 0
        self.max_tokens = max_tokens
        self.costs = costs
        self.clock = clock
        self.quality = quality
        #: Rows of draft steps, and those of them that drafted or read a token.
        self.num_rows = self.num_used = 0

    def can_draft(self, r: RequestRound) -> bool:
        return True

    def draft(self, round: Round) -> None:
        if not self.token_level:
            self._roll(round)
            return
        orders = [(r, num) for r in round if (num := self._chain(r)) > 0]
        if not orders:
            return
        if round.chains is not None:
            orders = self._worth_showing(orders, round.chains)
        steps = max((num for _, num in orders), default=1)
        self.clock.spend("head", steps * self.costs.head_step_ms(len(orders)))
        for r, num in orders:
            sure = self.quality().agreement
            r.chances = (sure,) * num
            self._write(r, self._made_up(r, num))

    def after_pass(self, round: Round) -> None:
        """Its KV of what was cut off is void."""
        if self.token_level:
            return
        for r in round:
            if not r.decision.pending:
                end = r.new_len
                answer_of(r).num_cached = min(answer_of(r).num_cached, end)

    def _chain(self, r: RequestRound) -> int:
        """Tokens of a head."""
        if r.draft.ended or not r.budgets.get(self.name):
            return 0
        at = r.output_len + len(r.draft.tokens)
        return min(r.budgets[self.name], max(0, answer_of(r).length - 1 - at))

    def _worth_showing(
        self, orders: Sequence[tuple[RequestRound, int]], rule: ChainCuts
    ) -> list[tuple[RequestRound, int]]:
        """Chains of a head that is always equally sure."""
        sure = self.quality().agreement
        lens = rule.choose([[sure] * num for _, num in orders])
        return [(r, num) for (r, _), num in zip(orders, lens, strict=True) if num]

    def _roll(self, round: Round) -> None:
        """A draft phase, as `DraftModel.propose` runs it."""
        drafting, requests = [], []
        for i, r in enumerate(round):
            if num_new := room_for(r, self.name):
                end = r.seq_len + 1 + len(r.draft.tokens)
                cached = min(answer_of(r).num_cached, end - 1)
                drafting.append(r)
                requests.append(
                    DraftRequest(
                        row=i,
                        tokens=range(end),
                        num_cached=cached,
                        num_new=num_new,
                        stop_ids=frozenset({STOP}),
                        batch_index=i,
                    )
                )
        if not requests:
            return
        phase = DraftPhase.of(round, len(requests))
        spans = [(one.num_cached, len(one.tokens)) for one in requests]
        most = min(phase.most_read, LONGEST_EXTEND)
        ends = read_ends(spans, most, lead=MOST_LEAD)
        num_read = sum(ends) - sum(start for start, _ in spans)
        self.clock.spend("host", self.costs.draft_host_ms)
        if num_read:
            ms = self.costs.catch_up_ms(num_read, len(requests))
            self.clock.spend("catch up", ms)
        lanes, texts, going = Lanes(), [], []
        for r, one, end in zip(drafting, requests, ends, strict=True):
            answer_of(r).num_cached = end
            if len(one.tokens) - end <= MOST_LEAD:
                lane = Lane(one, len(one.tokens) - end)
                lanes.append(lane)
                going.append(r)
                texts.append([0] * (lane.lead - 1) + self._made_up(r, one.num_new))
        num_steps = self._steps(lanes, texts, phase) if lanes else 0
        round.num_read += num_read
        round.num_draft_steps += num_steps
        for r, lane in zip(going, lanes, strict=True):
            forwarded = min(num_steps, lane.end + 1 - lane.start)
            answer_of(r).num_cached = lane.start + forwarded
            r.is_drafting = not lane.is_complete
            self._write(r, lane.tokens, ended=lane.ended)

    def _steps(
        self, lanes: Lanes, texts: Sequence[Sequence[int]], phase: DraftPhase
    ) -> int:
        steps: list[list[int]] = []
        step_ms = self.costs.step_ms(len(lanes))
        if (tokens := self.quality().tokens_a_step) > 1:
            # The host prepares each step when it has read the one before.
            step_ms = (step_ms + GUESS_MS) / tokens
        while not self._is_over(lanes, len(steps), phase):
            num = len(steps)
            self.num_rows += len(lanes)
            self.num_used += sum(not lane.is_done(num) for lane in lanes)
            steps.append([text[num] if num < len(text) else 0 for text in texts])
            kernel = ("draft", len(lanes).bit_length())
            self.clock.spend("draft", step_ms, kernel=kernel)
            lanes.see(steps)
        return len(steps)

    def _is_over(self, lanes: Lanes, num: int, phase: DraftPhase) -> bool:
        num_done = sum(lane.is_done(num) for lane in lanes)
        return num > 0 and lanes.is_over(num, num_done, phase)

    def _made_up(self, r: RequestRound, num: int) -> list[int]:
        """The next tokens of the draft, up to the one that ends the answer."""
        quality, req = self.quality(), answer_of(r)
        at = r.output_len + len(r.draft.tokens)
        num = min(num, req.length - at)
        rate = 0.0 if self.token_level else quality.error_rate(is_hard=req.is_hard)
        begins = [at + k - 1 in req.segment_ends for k in range(num)]
        kinds = quality.kinds(req.rng, begins, rate)
        if self.token_level:
            kinds = [DIFFERS if kind == WRONG else kind for kind in kinds]
        return [req.token(at + k, kind) for k, kind in enumerate(kinds)]

    def _write(
        self, r: RequestRound, tokens: Sequence[int], *, ended: bool = False
    ) -> None:
        ended = ended or tuple(tokens[-1:]) == (STOP,)
        tokens = tokens[:-1] if tuple(tokens[-1:]) == (STOP,) else tokens
        if tokens or ended:
            r.draft = r.draft.extended(
                self.name, tokens, ended=ended, token_level=self.token_level
            )

    def open(self, resources: Any) -> None:
        """Nothing to set up."""

    def before_prefill(self, prefill: Any) -> None:
        """It catches up when it first drafts."""

    def after_prefill(self, prefill: Any, features: Any, next_tokens: Any) -> None:
        """It catches up when it first drafts."""
