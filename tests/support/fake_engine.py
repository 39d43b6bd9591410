"""The engine with a fake target, fake slots and fake drafters: no server, no weights.

Token 2 is a line break and ends a segment under the segmenter `line`; token 3 ends the
response; all others are letters. The target's own continuation and its verdicts are
functions of the tokens before.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch

from sglang_parse.engine.failures import GuardedDrafters
from sglang_parse.engine.round import RoundEngine
from sglang_parse.engine.segmenting import Segmenting
from sglang_parse.judging.judges import question_scores
from sglang_parse.judging.prompt import JudgePrompt
from sglang_parse.options.request import RequestOptions
from sglang_parse.options.server import ParseConfig
from sglang_parse.policy.planner import RoundPlanner
from sglang_parse.probe.probe_verdicts import ProbeVerdicts
from sglang_parse.reporting.report import RequestReport
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState

YES, NO, LINE, STOP = 0, 1, 2, 3
VOCAB = 40
TEXTS = ["Y", "N", "\n", "", *(chr(ord("a") + i % 26) for i in range(VOCAB - 4))]
SUFFIX = (5, 6, 7)
Tokens = tuple[int, ...]


class FakeSlots:
    """A pool without end; notes how long each row is."""

    num_slots = 100_000
    page_size = 1

    def __init__(self, max_rows: int = 10_000, num_free: int = 50_000) -> None:
        self.max_rows = max_rows
        self.free = num_free
        self.extended: list[list[int]] = []

    def num_free(self, tree_cache: object, num_rows: int = 0) -> int:
        return self.free

    def extend_rows(self, batch, lens: Sequence[int]) -> None:
        self.extended.append([*lens])
        for req, n in zip(batch.reqs, lens, strict=True):
            req.kv.kv_allocated_len = max(req.kv.kv_allocated_len, n)

    def trim_rows(self, batch, lens: Sequence[int]) -> None:
        for req, n in zip(batch.reqs, lens, strict=True):
            req.kv.kv_allocated_len = min(req.kv.kv_allocated_len, n)


class FakeTarget:
    """own: the tokens before -> its next token. judge: the same -> P(yes). state: the
    same -> what a probe reads."""

    def __init__(
        self,
        own: Callable[[Tokens], int],
        judge: Callable[[Tokens], float],
        state: Callable[[Tokens], list[float]] = lambda tokens: [0.0],
    ) -> None:
        self.state = state
        #: By request's row, the draft of its last pass.
        self._shown: dict[int, Tokens] = {}
        self.own = own
        self.judge = judge
        self.num_passes = self.num_decodes = 0
        self.plans: list = []
        #: How many tokens each request of a round has decided.

    def verify(self, round: Round, plan) -> SimpleNamespace:
        self.num_passes += 1
        self.plans.append(plan)
        rows = []
        prefixes: list[Tokens] = []  # by row of the pass, suffixes left out
        for r, root in zip(round, plan.root_rows, strict=True):
            before = (written(r) + self._shown.get(r.row, ()))[: r.seq_len + 1]
            prefixes += [()] * (root - len(prefixes))
            chain = range(1 + len(r.shown))
            prefixes += [before + r.draft.tokens[:k] for k in chain]
            self._shown[r.row] = r.shown
            for boundary in r.segments.suffix_boundaries:
                p = self.judge(before + r.draft.tokens[:boundary])
                row = torch.full((VOCAB,), -50.0)
                row[YES], row[NO] = math.log(p), math.log(1 - p)
                rows.append(row)
        logits = torch.stack(rows) if rows else torch.zeros(0, VOCAB)
        return SimpleNamespace(
            logits=logits,
            kept=lambda: SimpleNamespace(logits=logits),
            states_at=lambda at: torch.tensor([self.state(prefixes[k]) for k in at]),
        )

    def decode(
        self, round: Round, go_on: Callable[[list[list[int]], int], bool]
    ) -> list[list[int]]:
        more: list[Tokens] = [()] * len(round)
        steps: list[list[int]] = []
        while not steps or (len(steps) < round.num_steps and go_on(steps, len(steps))):
            more = [
                (*tokens, self.own(written(r) + tokens))
                for r, tokens in zip(round, more, strict=True)
            ]
            steps.append([tokens[-1] for tokens in more])
        self.num_decodes += len(steps)
        round.output = SimpleNamespace(logits=None)
        round.sampled = [token for step in steps for token in step]
        return steps

    def sample(self, round: Round, owner, offset) -> tuple[list[int], list[int]]:
        tokens = []
        for i, j in zip(owner, offset, strict=True):
            r = round.requests[i]
            drafted = r.draft.tokens[:j]
            tokens.append(self.own(written(r) + drafted))
        return tokens, tokens

    def join_samples(self, samples):
        return list(itertools.chain(*samples))


class FakeDrafter:
    """Writes what `write` gives for the tokens before, as much as it may.

    steps: asked before each draft phase, the most tokens it writes of a request in it;
    where more is to be written, the request goes on drafting.
    """

    max_tokens = 4
    reads_features = False
    runners = ()

    def __init__(
        self,
        write: Callable[[Tokens], Sequence[int]],
        name: str = "model",
        token_level: bool = False,
        steps: Callable[[], int] | None = None,
    ) -> None:
        self.write = write
        self.steps = steps
        self.name = name
        self.token_level = token_level
        self.num_asked = self.num_phases = 0
        self.seen: list[Tokens] = []

    def can_draft(self, r: RequestRound) -> bool:
        return self.name not in r.state.failed_drafters

    def draft(self, round: Round) -> None:
        self.num_phases += 1
        steps = min(self.steps(), round.most_draft_steps) if self.steps else 1 << 30
        for r in round:
            most = r.budgets.get(self.name, 0)
            if not self.token_level:
                most = r.window - len(r.draft.tokens)
            if most <= 0 or r.draft.ended or not r.budgets.get(self.name):
                continue
            self.num_asked += 1
            tokens = tuple(self.write(written(r) + r.draft.tokens))[:most]
            ended = STOP in tokens
            tokens = tokens[: tokens.index(STOP)] if ended else tokens
            if len(tokens) > steps:
                tokens, ended, r.is_drafting = tokens[:steps], False, True
            r.draft = r.draft.extended(
                self.name, tokens, ended=ended, token_level=self.token_level
            )

    def after_pass(self, round: Round) -> None:
        self.seen = [r.decision.accept_tokens for r in round]

    def before_prefill(self, prefill) -> None: ...
    def after_prefill(self, prefill, features, next_tokens) -> None: ...


def written(r: RequestRound) -> Tokens:
    """All decided tokens of a request, its bonus token the last."""
    return (*r.req.origin_input_ids, *r.req.output_ids, *r.state.ready)


def make_request(
    mode: str = "semantic",
    *,
    prompt: Sequence[int] = (10, 11),
    output: Sequence[int] = (12,),
    max_new_tokens: int = 1000,
    config: ParseConfig | None = None,
    client=None,
    judge_kind: str = "suffix",
    **options,
) -> SimpleNamespace:
    """A running request with its state, as SGLang's Req is read."""
    req = SimpleNamespace(
        rid="r",
        origin_input_ids=list(prompt),
        output_ids=list(output),
        grammar=None,
        to_finish=None,
        vocab_size=1 << 20,
        kv=SimpleNamespace(kv_allocated_len=len(prompt) + len(output)),
        sampling_params=SimpleNamespace(
            max_new_tokens=max_new_tokens,
            stop_strs=[],
            stop_regex_strs=[],
            stop_str_max_len=0,
            stop_regex_max_len=0,
            custom_params={
                "parse_mode": mode,
                **{f"parse_{name}": value for name, value in options.items()},
            },
        ),
    )
    chosen = request_options(req, config or ParseConfig(segmenter="line"))
    req.state = RequestState(
        options=chosen,
        stop_ids=frozenset({STOP}),
        judge=JudgePrompt(SUFFIX, ((YES, NO),)) if mode == "semantic" else None,
        report=RequestReport(mode, "", want_segments=True),
        judge_kind=judge_kind if mode == "semantic" else "suffix",
        client=client,
    )
    return req


def request_options(req, config: ParseConfig) -> RequestOptions:
    params = req.sampling_params
    for name in ("frequency_penalty", "presence_penalty", "min_new_tokens"):
        setattr(params, name, 0)
    params.repetition_penalty, params.logit_bias = 1, None
    for name in (
        "input_embeds",
        "positional_embed_overrides",
        "custom_logit_processor",
        "return_logprob",
        "return_hidden_states",
    ):
        setattr(req, name, None)
    return RequestOptions.of(req, config, has_draft_model=True, has_token_level=True)


class FakeServer:
    """Rounds over a fixed batch of requests, their tokens emitted as SGLang does."""

    def __init__(
        self,
        target: FakeTarget,
        drafters: Sequence[FakeDrafter],
        *,
        slots: FakeSlots | None = None,
        config: ParseConfig | None = None,
        on_error: Callable[[str], None] = lambda name: None,
        probe=None,
        guard=None,
        pairs=None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config or ParseConfig(segmenter="line", adaptive=False)
        self.target = target
        self.slots = slots or FakeSlots()
        self.ranks = SimpleNamespace(
            agree=lambda value: value,
            agree_all=lambda lists: [tuple(one) for one in lists],
        )
        planner = RoundPlanner(
            self.config, self.ranks, self.slots, drafters, context_len=100_000
        )
        verdicts = None
        if probe is not None or pairs is not None:
            verdicts = ProbeVerdicts(
                question_scores,
                on_error,
                probe,
                guard,
                pairs,
                self.config.judge_suffix,
            )
        self.engine = RoundEngine(
            verdicts=verdicts,
            target=target,
            slots=self.slots,
            drafters=GuardedDrafters(drafters, on_error),
            planner=planner,
            segmenting=Segmenting(self.config, TEXTS),
            ranks=self.ranks,
            view=lambda batch, index: SimpleNamespace(
                reqs=[batch.reqs[i] for i in index], tree_cache=batch.tree_cache
            ),
            clock=clock,
        )

    def round(self, *reqs: SimpleNamespace) -> Round:
        """One round; the tokens of each request go to its output. Returns the round of
        those that took part in the pass."""
        done = self.engine.run(self.open_round(*reqs))
        self.emit(*reqs)
        return done

    def quantum(self, *reqs: SimpleNamespace, **more) -> list[Round]:
        """The passes of a quantum; the same becomes of their tokens."""
        rounds = self.engine.run_quantum(
            lambda: self.open_round(*reqs, **{"may_repeat": True} | more)
        )
        self.emit(*reqs)
        return rounds

    @staticmethod
    def emit(*reqs: SimpleNamespace) -> None:
        for req in reqs:
            req.output_ids += req.state.ready
            req.state.ready = ()

    def open_round(self, *reqs: SimpleNamespace, **more) -> Round:
        """The requests as they stand."""
        requests = []
        for row, req in enumerate(reqs):
            state = req.state
            if state.client is not None:
                state.follow_client([*req.output_ids, *state.ready])
            tokens = [*req.origin_input_ids, *req.output_ids, *state.ready]
            requests.append(
                RequestRound(
                    req=req,
                    state=state,
                    row=row,
                    seq_len=len(tokens) - 1,
                    bonus_token=tokens[-1],
                    output_len=len(req.output_ids) + len(state.ready),
                )
            )
        batch = SimpleNamespace(reqs=list(reqs), tree_cache=None)
        return Round(batch, requests, **more)
