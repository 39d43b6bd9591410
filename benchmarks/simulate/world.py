"""A server in virtual time: requests arrive, take part in rounds, and end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.simulate.clock import Clock
from benchmarks.simulate.costs import Costs
from benchmarks.simulate.drafts import TOKEN_TEXTS, Changing, Drafts
from benchmarks.simulate.fakes import (
    VERDICT_IDS,
    Answer,
    FakeDrafter,
    FakeSlots,
    FakeTarget,
    OneRank,
)
from sglang_parse.engine.failures import GuardedDrafters
from sglang_parse.engine.round import RoundEngine
from sglang_parse.engine.segmenting import Segmenting
from sglang_parse.judging.prompt import JudgePrompt
from sglang_parse.options.request import RequestOptions
from sglang_parse.options.server import ParseConfig
from sglang_parse.policy.planner import RoundPlanner
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl.scheduler_types import SchedulerRequest

Planner = Callable[..., RoundPlanner]

# Between two rounds of a quantum, estimated: ranks agree, and records are made anew.
# These took 0.005 to 0.04 ms on a CPU, of 1 to 32 requests.
IN_ROW_MS = 0.1


@dataclass(frozen=True)
class Scenario:
    """One run. Lengths are in tokens, shortest and longest.

    concurrency: requests at most. arrivals_s: seconds between arrivals on average, 0
    where the next comes as one ends. head: steps of an EAGLE-3 head, 0 without one.
    busy: by how much a neighbour slows the machine, and seconds of every ten. overlaps:
    whether Python runs beside decode steps, as in stock SGLang.
    """

    costs: Costs
    concurrency: int = 1
    drafts: Drafts | Changing = field(default_factory=Drafts)
    answers: tuple[int, int] = (400, 1200)
    prompts: tuple[int, int] = (200, 800)
    suffix_len: int = 24
    num_tokens: int = 8000
    warm_tokens: int = 0
    arrivals_s: float = 0.0
    mode: str = "semantic"
    head: int = 0
    head_agreement: float = 0.7
    noise: float = 0.05
    first_use_ms: float = 0.0
    busy: tuple[float, float] = (1.0, 0.0)
    config: ParseConfig = field(
        default_factory=lambda: ParseConfig(segmenter="line", mode="semantic")
    )
    overlaps: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """What a run gave. spent: milliseconds by kind of work; rounds: by kind of round.

    passes: target passes of each finished answer, in the order of their ends.
    """

    tokens: int
    ms: float
    spent: dict[str, float]
    rounds: dict[str, tuple[int, float]]
    passes: list[int]
    waits_ms: list[float]

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.ms


class World:
    """The shipped engine in a server of one scenario."""

    def __init__(self, scenario: Scenario, planner: Planner = RoundPlanner) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed)
        self.clock = Clock(
            random.Random(scenario.seed + 1),
            scenario.noise,
            scenario.first_use_ms,
            scenario.busy,
        )
        self.active: list[tuple[Answer, RequestState]] = []
        self.waiting: list[Answer] = []
        self.next_arrival_ms = 0.0
        self.rounds: dict[str, tuple[int, float]] = {}
        self.passes: list[int] = []
        self.waits_ms: list[float] = []
        #: Milliseconds of each quantum, and from each tokens of a stream to the next.
        self.quanta_ms: list[float] = []
        self.gaps_ms: list[float] = []
        self.tokens = 0
        self.engine = self._engine(planner)
        #: Called with each finished round, for tests and plots.
        self.watch: Callable[[Round], None] = lambda round: None

    def _engine(self, planner: Planner) -> RoundEngine:
        s = self.scenario
        slots, ranks = FakeSlots(), OneRank()
        drafters = [FakeDrafter("model", s.costs, self.clock, self.quality)]
        if s.head:
            head = FakeDrafter("eagle3", s.costs, self.clock, self._head, s.head)
            drafters.insert(0, head)
        return RoundEngine(
            target=FakeTarget(s.costs, self.clock, overlaps=s.overlaps),
            slots=slots,
            drafters=GuardedDrafters(drafters),
            planner=planner(
                s.config,
                ranks,
                slots,
                drafters,
                context_len=1 << 20,
            ),
            segmenting=Segmenting(s.config, TOKEN_TEXTS),
            ranks=ranks,
            view=lambda batch, index: batch,
            clock=self.clock,
        )

    def quality(self) -> Drafts:
        """What the draft model writes like now."""
        drafts = self.scenario.drafts
        return drafts.at(self.clock.ms) if isinstance(drafts, Changing) else drafts

    def _head(self) -> Drafts:
        return replace(self.quality(), agreement=self.scenario.head_agreement)

    # -- A run -----------------------------------------------------------------

    def run(self) -> Result:
        """Serve until enough tokens are written; those of the warm-up do not count."""
        s = self.scenario
        start_ms, start_tokens, spent = 0.0, 0, dict[str, float]()
        is_warm = not s.warm_tokens
        while self.tokens < s.num_tokens + s.warm_tokens:
            if not is_warm and self.tokens >= s.warm_tokens:
                is_warm = True
                start_ms, start_tokens = self.clock.ms, self.tokens
                spent, self.rounds = dict(self.clock.spent), {}
            self._step()
        return Result(
            tokens=self.tokens - start_tokens,
            ms=self.clock.ms - start_ms,
            spent={k: v - spent.get(k, 0.0) for k, v in self.clock.spent.items()},
            rounds=self.rounds,
            passes=self.passes,
            waits_ms=self.waits_ms,
        )

    def _step(self) -> None:
        """Admit who waits, then the rounds up to the scheduler's next work."""
        self._arrive()
        self._admit()
        if not self.active:
            self.clock.ms = max(self.clock.ms, self.next_arrival_ms)
            return
        if not self.scenario.overlaps:
            self.clock.spend("scheduler", self.scenario.costs.between_ms)
        started_ms = self.clock.ms

        def open_next() -> Round:
            self.clock.spend("host", IN_ROW_MS)
            return self.open_round()

        rounds = self.engine.run_quantum(open_next)
        self.quanta_ms.append(self.clock.ms - started_ms)
        self._emit()
        for round in rounds:
            num, ms = self.rounds.get(kind_of(round), (0, 0.0))
            took_ms = 1000 * sum(round.seconds.values())
            self.rounds[kind_of(round)] = num + 1, ms + took_ms
            for r in round:
                if r.error is not None:
                    raise r.error
            self.watch(round)

    def _has_mail(self) -> bool:
        """Whether somebody has come, of whom the scheduler does not know yet."""
        return bool(self.scenario.arrivals_s) and self.next_arrival_ms <= self.clock.ms

    def _arrive(self) -> None:
        s = self.scenario
        if not s.arrivals_s:
            while len(self.active) + len(self.waiting) < s.concurrency:
                self.waiting.append(self._answer())
            return
        while self.next_arrival_ms <= self.clock.ms:
            self.waiting.append(self._answer(self.next_arrival_ms))
            gap = self.rng.expovariate(1 / s.arrivals_s)
            self.next_arrival_ms += 1000 * gap

    def _admit(self) -> None:
        s = self.scenario
        while self.waiting and len(self.active) < s.concurrency:
            answer = self.waiting.pop(0)
            self.clock.spend("prefill", s.costs.prefill_ms(answer.prompt_len))
            answer.output_ids.append(answer.token(0, 3))
            answer.last_ms = self.clock.ms
            self.waits_ms.append(self.clock.ms - answer.arrived_ms)
            self.tokens += 1
            self.active.append((answer, self._state()))

    def _answer(self, arrived_ms: float | None = None) -> Answer:
        s, rng = self.scenario, random.Random(self.rng.random())
        length = rng.randint(*s.answers)
        ends, at, drafts = [], -1, self.quality()
        while at < length:
            at += drafts.segment_len(rng)
            ends.append(at)
        return Answer(
            length=length,
            prompt_len=rng.randint(*s.prompts),
            segment_ends=frozenset(ends),
            rng=rng,
            arrived_ms=self.clock.ms if arrived_ms is None else arrived_ms,
            is_hard=rng.random() < drafts.hard if drafts.hard else False,
        )

    def _state(self) -> RequestState:
        s = self.scenario
        options = RequestOptions.of(
            plain_request(s.mode), s.config, has_token_level=bool(s.head)
        )
        judge = JudgePrompt((9,) * s.suffix_len, VERDICT_IDS)
        report: Any = SimpleNamespace(
            record=lambda one: None, record_plain=lambda *told: None
        )
        return RequestState(options, frozenset({8}), judge, report)

    def open_round(self) -> Round:
        """The requests that run now, as rounds see them."""
        requests = [
            RequestRound(
                req=cast(SchedulerRequest, answer),
                state=state,
                row=i,
                seq_len=answer.seq_len + len(state.ready),
                bonus_token=(*answer.output_ids, *state.ready)[-1],
                output_len=len(answer.output_ids) + len(state.ready),
            )
            for i, (answer, state) in enumerate(self.active)
        ]
        batch = SimpleNamespace(tree_cache=None, sampling_info=None)
        return Round(
            batch,
            requests,
            num_waiting=len(self.waiting),
            has_mail=self._has_mail,
            may_repeat=True,
        )

    def _emit(self) -> None:
        """Hand over what the quantum has decided."""
        for answer, state in self.active:
            tokens, state.ready = state.ready, ()
            answer.output_ids += tokens
            self.tokens += len(tokens)
            if tokens:
                self.gaps_ms.append(self.clock.ms - answer.last_ms)
                answer.last_ms = self.clock.ms
            if answer.is_done:
                self.passes.append(answer.num_passes)
        self.active = [(a, s) for a, s in self.active if not a.is_done]


def plain_request(mode: str) -> Any:
    """What options are read from: a request that asks for nothing but a mode."""
    params = SimpleNamespace(
        custom_params={"parse_mode": mode},
        frequency_penalty=0,
        presence_penalty=0,
        repetition_penalty=1,
        min_new_tokens=0,
        logit_bias=None,
    )
    return SimpleNamespace(
        sampling_params=params,
        input_embeds=None,
        positional_embed_overrides=None,
        custom_logit_processor=None,
        grammar=None,
        return_logprob=False,
        return_hidden_states=False,
    )


def kind_of(round: Round) -> str:
    """plain, followed, recovering (all its requests) or judged."""
    if "plain" in round.seconds:
        return "plain"
    if not any(r.boundaries for r in round):
        return "recovering" if round.judged else "followed"
    return "judged"


def target_alone(scenario: Scenario) -> Result:
    """The same requests by the target alone, as stock SGLang serves them."""
    return World(replace(scenario, mode="off", overlaps=True)).run()
