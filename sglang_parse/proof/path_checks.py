"""How each fast path is tried: the same tokens by it and by the plain path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from torch import Tensor

from sglang_parse.drafting.head_graphs import HeadInput
from sglang_parse.drafting.runner import DraftRunner
from sglang_parse.proof.plain_path import (
    LEAST_ALLOWED,
    NOISE_TIMES,
    TAIL,
    PlainPath,
    ProbeRows,
    Reference,
    borrowed_rows,
    difference,
    kept,
)
from sglang_parse.requests.round_records import Round
from sglang_parse.sgl.architecture import has_recurrent_state
from sglang_parse.sgl.compat.graph_changes import graphs_of_pass
from sglang_parse.sgl.fast_paths import (
    DRAFT_STEPS,
    HEAD_PREFILLS,
    HEAD_STEPS,
    PASS_GRAPHS,
    SAMPLED_ROWS,
    SHORT_PASSES,
    TARGET_STEPS,
    route_path,
)
from sglang_parse.sgl.graphs import why_not
from sglang_parse.sgl.sampling import TokenNeeds, expand_rows, sample_rows
from sglang_parse.sgl.upload import upload
from sglang_parse.verify.backends.routes import backend_of
from sglang_parse.verify.layout import PassRequest, VerifyPlan, build_verify_plan
from sglang_parse.verify.output import PassOutput
from sglang_parse.verify.passes import TargetVerifier
from sglang_parse.verify.short_passes import ShortPasses

SUFFIX_LEN = 3
# Draft tokens behind which a prefix is judged.
CUTS = (1, TAIL - 1)
NOT_CAPTURED = "decode steps are not captured"


class NotTaken(RuntimeError):
    """The server would not take the path for the texts of the proof."""


@dataclass(frozen=True)
class PathCheck:
    """absent: why the server has no such path, "" where it has. measure: how far it
    lies from the plain path, and how far it may. unproven: why it is not tried."""

    name: str
    absent: Callable[[], str]
    measure: Callable[[], tuple[float, float]]
    unproven: str = ""


def open_checks(
    parts: Any, engine: Any, stack: ExitStack, *, is_full: bool
) -> Iterator[PathCheck]:
    """All checks of a server, in the order of PATHS, but for routes that its attention
    backend does not have. parts, engine: as for `prove`. stack: what is borrowed goes
    back when it closes. is_full: whether all captured sizes are tried."""
    target = TargetChecks(parts.verifier, engine.target.short_passes)
    others = [
        HeadChecks(r) if r.is_head else DraftChecks(r) for r in parts.draft_runners
    ]
    for group in (target, *others):
        group.is_full = is_full
        stack.callback(group.borrowed.close)
        yield from group.checks()
    yield from SampledRows(parts.verifier.runner).checks()


class RunnerChecks:
    """Forwards of one ModelRunner. Rows are borrowed when a path is first tried."""

    num_scratch = 0
    is_full = False

    def __init__(self, runner: Any, layout: Any = None) -> None:
        """layout: of a draft model on the ranks, None for the target."""
        self.runner, self.layout = runner, layout
        self.borrowed = ExitStack()

    @cached_property
    def probe(self) -> ProbeRows:
        rows = borrowed_rows(self.runner, num_scratch=self.num_scratch)
        return self.borrowed.enter_context(rows)

    @cached_property
    def reference(self) -> Reference:
        return Reference(PlainPath(self.runner, self.probe, self.scope))

    @contextmanager
    def scope(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.layout is not None:
                stack.enter_context(draft_tp_context(self.layout))
                stack.enter_context(draft_pp_context())
            yield

    @property
    def graphs(self) -> Any:
        return self.runner.decode_cuda_graph_runner

    def why_no_steps(self) -> str:
        return "" if getattr(self.graphs, "max_bs", 0) else NOT_CAPTURED

    def measure_steps(self, step: Any) -> tuple[float, float]:
        found = [self.reference.of_steps(step, rows) for rows in self._rows_of_steps()]
        return max(found), self.reference.allowed

    def _rows_of_steps(self) -> Iterator[list[int]]:
        """Texts of each step that is tried: all, then fewer than any size captured, and
        one. All captured sizes, and one row less, in a full proof."""
        num = len(self.probe)
        sizes = {num, max(1, num - 1), 1}
        captured = list(self.graphs.capture_bs)
        if self.is_full:
            sizes |= {n for bs in captured for n in (bs, bs - 1) if n}
        if getattr(self.graphs, "disable_padding", False):
            sizes &= set(captured)
        for size in sorted(n for n in sizes if n <= self.graphs.max_bs):
            yield [i % num for i in range(size)]


class TargetChecks(RunnerChecks):
    """Steps and passes of the target."""

    num_scratch = len(CUTS) * SUFFIX_LEN

    def __init__(self, verifier: TargetVerifier, short_passes: ShortPasses) -> None:
        super().__init__(verifier.runner)
        self.verifier, self.short_passes = verifier, short_passes

    def checks(self) -> Iterator[PathCheck]:
        has_state = has_recurrent_state(self.runner)
        unproven = "the target keeps recurrent states" if has_state else ""
        check = partial(PathCheck, unproven=unproven)
        steps = partial(self.measure_steps, self.step)
        yield check(TARGET_STEPS, self.why_no_steps, steps)
        for route in backend_of(self.runner.prefill_attention_backend_str).inputs:
            measure = partial(self.measure_pass, route)
            yield check(route_path(route), lambda: "", measure)
        yield check(PASS_GRAPHS, self.why_no_graphs, self.measure_graphs)
        yield check(SHORT_PASSES, self.why_no_short, self.measure_short)

    def step(self, ids: Sequence[int], rows: Tensor, lens: Sequence[int]) -> Tensor:
        on_host = torch.tensor(lens)
        output = self.verifier.decode(
            input_ids=upload(ids, rows.device),
            req_pool_indices=rows,
            seq_lens=upload(on_host, rows.device),
            seq_lens_cpu=on_host,
            table=self.probe.table,
            return_hidden_states=False,
        )
        return output.logits

    def _plan(self, cuts: tuple[int, ...]) -> VerifyPlan:
        """The first token of each tail is the bonus token, the others are the draft."""
        suffix = tuple(self.probe.wrong[0][:SUFFIX_LEN]) if cuts else ()
        pairs = zip(self.probe.lens, self.probe.texts, strict=True)
        return build_verify_plan(
            [PassRequest(n, text[n], text[n + 1 :], cuts, suffix) for n, text in pairs]
        )

    def _measure_tails(self, plan: VerifyPlan, output: PassOutput) -> float:
        """How far the rows of the tails lie off, and what reads their KV."""
        found = [self.reference.of_kv(range(len(self.probe)))]
        for j, wanted in enumerate(self.reference.behind):
            rows = [root + j for root in plan.root_rows]
            logits = self.verifier.logits_of(output, rows)
            found.append(difference(logits, wanted))
        return max(found)

    # -- Passes ----------------------------------------------------------------

    @cached_property
    def judged(self) -> list[Tensor]:
        """Plain logits behind the question after each cut: one prefill each."""
        suffix = self.probe.wrong[0][:SUFFIX_LEN]
        pairs = list(zip(self.probe.lens, self.probe.texts, strict=True))
        prefixes = [[text[: num + 1 + cut] for num, text in pairs] for cut in CUTS]
        prefill = self.reference.plain.prefill
        return [prefill([[*p, *suffix] for p in each]) for each in prefixes]

    def measure_pass(
        self, route: str, *, by_graphs: bool = False
    ) -> tuple[float, float]:
        plan, judged, probe = self._plan(CUTS), self.judged, self.probe
        self.reference.spoil()
        output = self.verifier.verify_by(
            route,
            plan,
            rows=probe.rows.tolist(),
            req_pool_indices=probe.rows,
            scratch=probe.scratch,
            table=probe.table,
            by_graphs=by_graphs,
        ).kept()
        verdicts = kept(output.logits)
        found = [self._measure_tails(plan, output)]
        for k, wanted in enumerate(judged):
            found.append(difference(verdicts[k :: len(CUTS)], wanted))
        return max(found), self.reference.allowed

    def why_no_graphs(self) -> str:
        if not self.verifier.routes:
            return "no verify route is on"
        return why_not(self.runner.prefill_cuda_graph_runner)

    def measure_graphs(self) -> tuple[float, float]:
        before = self.verifier.pass_graphs.num_served
        found = self.measure_pass(self.verifier.routes[0], by_graphs=True)
        if self.verifier.pass_graphs.num_served == before:
            raise NotTaken("no captured size fits the pass")
        return found

    def why_no_short(self) -> str:
        if not self.verifier.paths.is_on(TARGET_STEPS):
            return f"{TARGET_STEPS} is off"
        return "" if self.short_passes.most_rows else NOT_CAPTURED

    def measure_short(self) -> tuple[float, float]:
        batch = SimpleNamespace(
            reqs=[None] * len(self.probe),
            req_pool_indices=self.probe.rows,
            return_hidden_states=False,
        )
        plan, round = self._plan(()), Round(batch, [])  # type: ignore[arg-type]
        if not self.short_passes.fits(round, plan):
            raise NotTaken("no captured step fits the pass")
        self.reference.spoil()
        output = self.short_passes.run(round, plan)
        output = replace(output, logits=kept(output.logits))
        return self._measure_tails(plan, output), self.reference.allowed


class DraftChecks(RunnerChecks):
    """Captured decode steps of a draft model."""

    def __init__(self, model: DraftRunner) -> None:
        super().__init__(model.runner, model.layout)
        self.model = model

    def checks(self) -> Iterator[PathCheck]:
        measure = partial(self.measure_steps, self.step)
        yield PathCheck(DRAFT_STEPS, self.why_no_steps, measure)

    def step(self, ids: Sequence[int], rows: Tensor, lens: Sequence[int]) -> Tensor:
        on_host = torch.tensor(lens)
        at = upload(on_host, rows.device)
        with self.scope():
            tokens = upload(ids, rows.device)
            output = self.model.decode(tokens, rows, at, on_host, self.probe.table)
        return output.next_token_logits


class HeadChecks(RunnerChecks):
    """Captured prefills and steps of a head of the target."""

    def __init__(self, head: Any) -> None:
        super().__init__(head.runner, head.layout)
        self.head = head

    def checks(self) -> Iterator[PathCheck]:
        missing = self.head.graphs.missing
        for name, what, run in (
            (HEAD_PREFILLS, "prefills", self.prefill),
            (HEAD_STEPS, "steps", self.steps),
        ):
            why = partial(missing.get, what, "")
            yield PathCheck(name, why, partial(self.measure, run))

    def measure(
        self, run: Callable[[Sequence[int]], list[Tensor]]
    ) -> tuple[float, float]:
        with graphs_of_pass(self.runner):
            plain = run(range(len(self.probe)))
            one = [run([i]) for i in range(len(self.probe))]
        again = [torch.cat(parts) for parts in zip(*one, strict=True)]
        noise = max(map(difference, again, plain))
        found = max(map(difference, run(range(len(self.probe))), plain))
        return found, NOISE_TIMES * noise + LEAST_ALLOWED

    def prefill(self, index: Sequence[int]) -> list[Tensor]:
        """Logits and hidden states behind texts that the head reads, then of a step
        that reads their KV."""
        output = self._read(index)
        with graphs_of_pass(self.runner):
            return [*self._of(output), *self._steps(index, output.hidden_states, 1)]

    def steps(self, index: Sequence[int]) -> list[Tensor]:
        """The same behind each token of a chain."""
        with graphs_of_pass(self.runner):
            hidden = self._read(index).hidden_states
        return self._steps(index, hidden, TAIL)

    def _read(self, index: Sequence[int]) -> Any:
        texts = [self.probe.texts[i] + self.probe.wrong[i] for i in index]
        with graphs_of_pass(self.runner):  # other KV where the steps are to write
            self._extend(index, texts, seed=2)
        return self._extend(index, [self.probe.texts[i] for i in index], seed=1)

    def _extend(
        self, index: Sequence[int], texts: list[list[int]], *, seed: int
    ) -> Any:
        lens = [len(text) for text in texts]
        features = [
            self._features(i, n, seed) for i, n in zip(index, lens, strict=True)
        ]
        with self.scope():
            return self.head.extend(
                [token for text in texts for token in text],
                self.probe.rows[list(index)],
                [0] * len(texts),
                lens,
                self.probe.table,
                HeadInput(torch.cat(features)),
            )

    def _features(self, i: int, num: int, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(100 * seed + i)
        made = torch.randn(num, self.head.features_width, generator=draw)
        return made.to(self.runner.device, self.runner.dtype)

    def _steps(self, index: Sequence[int], hidden: Tensor, num: int) -> list[Tensor]:
        rows, found = self.probe.rows[list(index)], []
        at = torch.tensor([len(self.probe.texts[i]) for i in index])
        for j in range(num):
            ids = upload([self.probe.wrong[i][j] for i in index], rows.device)
            self.head.graphs.load(hidden)
            with self.scope():
                position = upload(at + j, rows.device)
                given = HeadInput(hidden)
                output = self.head.decode(
                    ids, rows, position, at + j, self.probe.table, given
                )
            hidden = output.hidden_states
            found += self._of(output)
        return found

    def _of(self, output: Any) -> list[Tensor]:
        return [kept(output.next_token_logits), kept(output.hidden_states)]


class SampledRows:
    """Several rows of a request, drawn at once, against rows of their own."""

    index = (0, 0, 1, 2, 2, 2)

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def checks(self) -> Iterator[PathCheck]:
        yield PathCheck(SAMPLED_ROWS, lambda: "", self.measure)

    def measure(self) -> tuple[float, float]:
        """The share of tokens that differ. Each request has a token of its own that its
        bias leaves no choice but to draw."""
        device, num = self.runner.device, len(self.index)
        draw = torch.Generator().manual_seed(7)
        shape = (num, self.runner.model_config.vocab_size)
        logits = torch.randn(shape, generator=draw).to(device)
        places = torch.arange(3, 3 + num, device=device)
        num_wrong = 0
        for is_cut in (False, True):
            info = expand_rows(self._info((0, 1, 2), is_cut), [*self.index], device)
            found = self._draw(logits.clone(), info, places).tolist()
            for k, i in enumerate(self.index):
                rows, info = slice(k, k + 1), self._info((i,), is_cut)
                one = expand_rows(info, [0], device)
                own = self._draw(logits[rows].clone(), one, places[rows]).tolist()
                num_wrong += own != found[rows]
        return num_wrong / (2 * num), 0.0

    def _draw(self, logits: Tensor, info: Any, places: Tensor) -> Tensor:
        tokens, _ = sample_rows(
            self.runner,
            logits,
            sampling_info=info,
            positions=places,
            grammar_mask=None,
            needs=TokenNeeds(False, [], []),
        )
        return tokens

    def _info(self, requests: Sequence[int], is_cut: bool) -> Any:
        """is_cut: whether they ask for top-k and top-p, which are drawn otherwise."""
        device, vocab = self.runner.device, self.runner.model_config.vocab_size
        ones = torch.ones(len(requests), device=device)
        bias = torch.zeros(len(requests), vocab, device=device)
        for row, i in enumerate(requests):
            bias[row, i] = 1e4
        temperatures = torch.tensor([[0.7 + 0.3 * i] for i in requests])
        return SamplingBatchInfo(
            temperatures=temperatures.to(device),
            top_ps=0.9 * ones if is_cut else ones,
            top_ks=(40 if is_cut else 1 << 30) * ones.to(torch.int32),
            min_ps=0 * ones,
            is_all_greedy=False,
            is_any_greedy=False,
            need_top_p_sampling=is_cut,
            need_top_k_sampling=is_cut,
            need_min_p_sampling=False,
            vocab_size=vocab,
            logit_bias=bias,
            device=str(device),
        )
