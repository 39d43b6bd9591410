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
from sglang_parse.drafting.draft_model import CAPTURED_CATCH_UP
from sglang_parse.requests.draft import ChainCuts
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.verify.layout import VerifyPlan

# Share of a draft loop's host time that lies before its second step, and so beside a
# first step that runs ahead. On a CPU it was 0.58 of 0.86 ms at one request, and 1.04
# of 1.44 ms at eight.
BEFORE_SECOND_STEP = 0.67
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
    first_token_ms: float = 0.0
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
        self.runs_ahead = costs.runs_ahead and not overlaps
        #: Whose next step runs beside the host, with the tokens in front of it.
        self._ahead: dict[int, int] = {}

    def verify(self, round: Round, plan: VerifyPlan) -> Any:
        self._ahead = {}
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

    def look_ahead(self, round: Round) -> None:
        own = [self._ahead.get(id(r.req)) == r.output_len for r in round]
        self._ahead = {}
        if any(own):
            round.took_ahead = True
            round.num_steps = max(round.num_steps, 1 + (not all(own)))
            for r, is_own in zip(round, own, strict=True):
                r.num_skipped = int(not is_own)

    def decode(
        self, round: Round, go_on: Callable[[list[list[int]], int], bool]
    ) -> list[list[int]]:
        bs = len(round)
        kernel = ("plain", bs.bit_length())
        steps: list[list[int]] = []
        self.clock.spend("host", self.plain_host_ms)
        waits = self.clock.join()
        round.is_late = round.took_ahead and not waits
        # A device is at the last step when the next one is launched.
        while not steps or (
            len(steps) < round.num_steps and go_on(steps[:-1], len(steps))
        ):
            if steps or not round.took_ahead:
                self.clock.spend("plain", self.costs.plain_ms(bs), kernel)
            done = len(steps)
            places = [
                (answer_of(r), r.output_len + done - r.num_skipped) for r in round
            ]
            steps.append([answer.token(at, TARGETS_OWN) for answer, at in places])
        num = len(steps)
        is_whole = num == round.num_steps and round.goes_on
        if self.runs_ahead and is_whole and go_on(steps[:-1], num):
            self.clock.start("plain", self.costs.plain_ms(bs))
            self._ahead = {id(r.req): r.output_len + num - r.num_skipped for r in round}
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

    elsewhere = False
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
        #: Whose next draft begins beside the host, and where.
        self._first: dict[int, int] = {}
        self._wrote = False

    def can_draft(self, r: RequestRound) -> bool:
        return True

    def draft(self, round: Round) -> None:
        orders = [(r, self._num_new(r)) for r in round]
        orders = [(r, num) for r, num in orders if num > 0]
        if not orders:
            return
        steps = max(num for _, num in orders)
        if self.token_level:
            self.clock.join()
            if round.chains is not None:
                orders = self._worth_showing(orders, round.chains)
            self.clock.spend("head", steps * self.costs.head_step_ms(len(orders)))
        else:
            round.num_read += self._spend(steps, orders)
        for r, num in orders:
            self._write(r, num)

    def after_pass(self, round: Round) -> None:
        """Its KV of what was cut off is void."""
        if self.token_level:
            return
        for r in round:
            if not r.decision.pending:
                end = r.new_len
                answer_of(r).num_cached = min(answer_of(r).num_cached, end)
        writers = [r for r in round if r.draft.num_new]
        self._first = {}
        if self.costs.runs_ahead and self._wrote and writers:
            self._step_ahead(writers)
        self._wrote = bool(writers)

    def _step_ahead(self, requests: Sequence[RequestRound]) -> None:
        ends = [r.new_len + 1 + len(r.decision.pending) for r in requests]
        pairs = list(zip(requests, ends, strict=True))
        missing = [max(1, end - answer_of(r).num_cached) for r, end in pairs]
        if max(missing) <= CAPTURED_CATCH_UP:
            self._first = {id(r.req): end for r, end in pairs}
            ms = self.costs.catch_up_ms(sum(missing), max(missing), len(requests))
            self.clock.start("catch up", ms)

    def _num_new(self, r: RequestRound) -> int:
        if r.draft.ended or not r.budgets.get(self.name):
            return 0
        at = r.output_len + len(r.draft.tokens)
        left = max(0, answer_of(r).length - 1 - at)
        if self.token_level:
            return min(r.budgets[self.name], left)
        held = min(len(r.state.pending), r.window)
        return min(r.window - max(held, len(r.draft.tokens)), left)

    def _worth_showing(
        self, orders: Sequence[tuple[RequestRound, int]], rule: ChainCuts
    ) -> list[tuple[RequestRound, int]]:
        """Chains of a head that is always equally sure."""
        sure = self.quality().agreement
        lens = rule.choose([[sure] * num for _, num in orders])
        return [(r, num) for (r, _), num in zip(orders, lens, strict=True) if num]

    def _spend(self, steps: int, orders: Sequence[tuple[RequestRound, int]]) -> int:
        """Let the time of a draft pass. Returns the tokens that were read first."""
        bs = len(orders)
        missing, is_first = [], True
        for r, num in orders:
            end = r.seq_len + 1 + len(r.draft.tokens)
            missing.append(end - min(answer_of(r).num_cached, end - 1))
            answer_of(r).num_cached = end + num - 1
            is_first = is_first and self._first.get(id(r.req)) == end
        host_ms = self.costs.draft_host_ms
        if is_first:
            hidden_ms = BEFORE_SECOND_STEP * host_ms
            self.clock.spend("catch up", hidden_ms)
            self.clock.join()
            self.clock.spend("catch up", host_ms - hidden_ms)
        else:
            self.clock.join()
            ms = self.costs.catch_up_ms(sum(missing), max(missing), bs)
            self.clock.spend("catch up", ms + host_ms)
        ms = (steps - 1) * self.costs.step_ms(bs)
        self.clock.spend("draft", ms, kernel=("draft", bs.bit_length()))
        return sum(missing) - bs

    def _write(self, r: RequestRound, num: int) -> None:
        quality, req = self.quality(), answer_of(r)
        rate = 0.0 if self.token_level else quality.error_rate(is_hard=req.is_hard)
        at = r.output_len + len(r.draft.tokens)
        begins = [at + k - 1 in req.segment_ends for k in range(num)]
        kinds = quality.kinds(req.rng, begins, rate)
        if self.token_level:
            kinds = [DIFFERS if kind == WRONG else kind for kind in kinds]
        tokens = [req.token(at + k, kind) for k, kind in enumerate(kinds)]
        ended = at + num >= req.length - 1
        if self.token_level:
            r.chances = (quality.agreement,) * num
        r.draft = r.draft.extended(
            self.name, tokens, ended=ended, token_level=self.token_level
        )

    def open(self, resources: Any) -> None:
        """Nothing to set up."""

    def before_prefill(self, prefill: Any) -> None:
        """It catches up when it first drafts."""

    def after_prefill(self, prefill: Any, features: Any, next_tokens: Any) -> None:
        """It catches up when it first drafts."""
