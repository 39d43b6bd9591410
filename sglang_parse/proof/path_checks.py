"""How each fast path is tried: the same tokens by it and by the plain path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from torch import Tensor

from sglang_parse.drafting.head_graphs import HeadInput
from sglang_parse.proof.plain_path import (
    LEAST_ALLOWED,
    NOISE_TIMES,
    TAIL,
    ProbeRows,
    Reference,
    borrowed_rows,
    difference,
    kept,
)
from sglang_parse.requests.round_records import Round
from sglang_parse.sgl.compat.graph_changes import graphs_of_pass
from sglang_parse.sgl.fast_paths import (
    DRAFT_STEPS,
    GUESSED_ROWS,
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
    lies from the plain path, and how far it may. must: whether it is off unless that
    could be measured."""

    name: str
    absent: Callable[[], str]
    measure: Callable[[], tuple[float, float]]
    must: bool = False


def open_checks(parts: Any, engine: Any, *, is_full: bool) -> Iterator[PathCheck]:
    """All checks of a server, in the order of PATHS, but for routes that its attention
    backend does not have. parts, engine: as for `prove`. is_full: whether all captured
    sizes are tried."""
    groups: list[Any] = [TargetChecks(parts.verifier, engine.target.short_passes)]
    for one in parts.draft_runners:
        groups.append(HeadChecks(one) if one.is_head else DraftChecks(one))
    for group in groups:
        group.is_full = is_full
        with group.borrowed:
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
        rows = borrowed_rows(self.runner, self.num_scratch)
        return self.borrowed.enter_context(rows)

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.runner, self.probe, self.scope)

    @contextmanager
    def scope(self) -> Iterator[None]:
        if self.layout is None:
            yield
            return
        with draft_tp_context(self.layout), draft_pp_context():
            yield

    def why_no_steps(self) -> str:
        graphs = self.runner.decode_cuda_graph_runner
        return "" if getattr(graphs, "max_bs", 0) else NOT_CAPTURED

    def measure_steps(self, step: Any) -> tuple[float, float]:
        found = [self.reference.of_steps(step, rows) for rows in self._rows_of_steps()]
        return max(found), self.reference.allowed

    def _rows_of_steps(self) -> Iterator[list[int]]:
        """Texts of each step that is tried: all, then fewer than any size captured, and
        one. All captured sizes, and one row less, in a full proof."""
        num, graphs = len(self.probe), self.runner.decode_cuda_graph_runner
        sizes = {num, max(1, num - 1), 1}
        if self.is_full:
            sizes |= {n for bs in graphs.capture_bs for n in (bs, bs - 1) if n}
        if getattr(graphs, "disable_padding", False):
            sizes &= {*graphs.capture_bs}
        for size in sorted(n for n in sizes if n <= graphs.max_bs):
            yield [i % num for i in range(size)]


class TargetChecks(RunnerChecks):
    """Steps and passes of the target."""

    num_scratch = len(CUTS) * SUFFIX_LEN

    def __init__(self, verifier: TargetVerifier, short_passes: ShortPasses) -> None:
        super().__init__(verifier.runner)
        self.verifier, self.short_passes = verifier, short_passes

    def checks(self) -> Iterator[PathCheck]:
        steps = partial(self.measure_steps, self.step)
        yield PathCheck(TARGET_STEPS, self.why_no_steps, steps)
        for route in backend_of(self.runner.prefill_attention_backend_str).inputs:
            measure = partial(self.measure_pass, route)
            yield PathCheck(route_path(route), lambda: "", measure)
        yield PathCheck(PASS_GRAPHS, self.why_no_graphs, self.measure_graphs)
        if self.verifier.steps_alone:
            chain = PathCheck(SHORT_PASSES, lambda: "", self.measure_chain, must=True)
            yield chain
        else:
            yield PathCheck(SHORT_PASSES, self.why_no_short, self.measure_short)

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
        texts = [[[*t[: n + 1 + cut], *suffix] for n, t in pairs] for cut in CUTS]
        return [self.reference.prefill(each) for each in texts]

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

    def measure_chain(self) -> tuple[float, float]:
        """The tails as rows of one step, against a plain step for each token: what an
        index selects may differ in a prefill."""
        everyone, reference = range(len(self.probe)), self.reference
        wanted = reference.stepped(everyone)
        one = [reference.stepped([i]) for i in everyone]
        alone = [torch.cat(parts) for parts in zip(*one, strict=True)]
        plan, round = self._chain()
        reference.spoil()
        logits = kept(self.short_passes.run(round, plan).logits)
        found = [logits[[r + j for r in plan.root_rows]] for j in range(TAIL)]
        found.append(reference.next_step(everyone, TAIL))
        noise = max(map(difference, alone, wanted))
        return max(map(difference, found, wanted)), NOISE_TIMES * noise + LEAST_ALLOWED

    def _chain(self) -> tuple[VerifyPlan, Round]:
        """The tails as a pass without verdicts."""
        batch = SimpleNamespace(
            reqs=[None] * len(self.probe),
            req_pool_indices=self.probe.rows,
            return_hidden_states=False,
        )
        return self._plan(()), Round(batch, [])  # type: ignore[arg-type]

    def measure_short(self) -> tuple[float, float]:
        plan, round = self._chain()
        if not self.short_passes.fits(round, plan):
            raise NotTaken("no captured step fits the pass")
        self.reference.spoil()
        output = self.short_passes.run(round, plan)
        output = replace(output, logits=kept(output.logits))
        return self._measure_tails(plan, output), self.reference.allowed


class DraftChecks(RunnerChecks):
    """Captured decode steps of a draft model, and steps with rows for its guesses."""

    def __init__(self, model: Any) -> None:
        """model: `drafting.draft_model.DraftModel`."""
        super().__init__(model.runner, model.layout)
        self.model = model

    def checks(self) -> Iterator[PathCheck]:
        measure = partial(self.measure_steps, self.step)
        yield PathCheck(DRAFT_STEPS, self.why_no_steps, measure)
        yield PathCheck(GUESSED_ROWS, self.why_no_guesses, self.measure_rows)

    def why_no_guesses(self) -> str:
        guesses = self.model.guesses or self.model.head
        return "" if guesses else "--speculative-parse-draft-compose is none"

    def measure_rows(self) -> tuple[float, float]:
        """Each tail as rows of one step, which read the KV that the step writes."""
        everyone = range(len(self.probe))
        places = [(i, j) for i in everyone for j in range(TAIL)]
        ids = [self.probe.texts[i][j - TAIL] for i, j in places]
        lens = [self.probe.lens[i] + j for i, j in places]
        rows = self.probe.rows[[i for i, _ in places]]
        self.reference.spoil()
        logits = kept(self.step(ids, rows, lens))
        found = [
            difference(logits[j::TAIL], wanted)
            for j, wanted in enumerate(self.reference.behind)
        ]
        found.append(self.reference.of_kv(everyone))
        return max(found), self.reference.allowed

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
        for name, what in ((HEAD_PREFILLS, "prefills"), (HEAD_STEPS, "steps")):
            why = partial(self.head.graphs.missing.get, what, "")
            yield PathCheck(name, why, partial(self.measure, what))

    def measure(self, what: str) -> tuple[float, float]:
        everyone = range(len(self.probe))
        plain = self._run(everyone)
        one = [self._run([i]) for i in everyone]
        again = [torch.cat(parts) for parts in zip(*one, strict=True)]
        found = max(map(difference, self._run(everyone, what), plain))
        noise = max(map(difference, again, plain))
        return found, NOISE_TIMES * noise + LEAST_ALLOWED

    def _run(self, index: Sequence[int], captured: str = "") -> list[Tensor]:
        """Logits and hidden states behind texts that the head reads, and behind each
        token of a chain. captured: which of its forwards may replay graphs."""
        probe, head = self.probe, self.head
        rows, texts = probe.rows[list(index)], [probe.texts[i] for i in index]
        wrong = [probe.texts[i] + probe.wrong[i] for i in index]
        self._extend(index, wrong, "")  # other KV where the steps are to write
        outputs = [self._extend(index, texts, captured)]
        at = torch.tensor([len(text) for text in texts])
        for j in range(TAIL):
            hidden = outputs[-1].hidden_states
            ids = upload([probe.wrong[i][j] for i in index], rows.device)
            place = (upload(at + j, rows.device), at + j, probe.table)
            with self._graphs(captured == "steps"):
                head.graphs.load(hidden)
                output = head.decode(ids, rows, *place, HeadInput(hidden))
            outputs.append(own(output))
        return [t for o in outputs for t in (o.next_token_logits, o.hidden_states)]

    def _extend(
        self, index: Sequence[int], texts: Sequence[list[int]], captured: str
    ) -> Any:
        lens, made = [len(text) for text in texts], []
        for i, num in zip(index, lens, strict=True):
            draw = torch.Generator().manual_seed(100 + i)
            made.append(torch.randn(num, self.head.features_width, generator=draw))
        states = torch.cat(made).to(self.runner.device, self.runner.dtype)
        ids, rows = [t for text in texts for t in text], self.probe.rows[list(index)]
        where = ([0] * len(lens), lens, self.probe.table)
        with self._graphs(captured == "prefills"):
            output = self.head.extend(ids, rows, *where, HeadInput(states))
        return own(output)

    @contextmanager
    def _graphs(self, are_on: bool) -> Iterator[None]:
        off = nullcontext() if are_on else graphs_of_pass(self.runner)
        with self.scope(), off:
            yield


def own(output: Any) -> Any:
    """What a head gives, in tensors that no later forward writes into."""
    logits = kept(output.next_token_logits)
    return SimpleNamespace(
        next_token_logits=logits, hidden_states=output.hidden_states.clone()
    )


class SampledRows:
    """Several rows of a request, drawn at once, against rows of their own."""

    index = (0, 0, 1, 2, 2, 2)

    def __init__(self, runner: Any) -> None:
        self.runner, self.vocab_size = runner, runner.model_config.vocab_size

    def checks(self) -> Iterator[PathCheck]:
        yield PathCheck(SAMPLED_ROWS, lambda: "", self.measure)

    def measure(self) -> tuple[float, float]:
        """The share of tokens that differ. Each request has a token of its own that its
        bias leaves no choice but to draw."""
        num, num_wrong = len(self.index), 0
        draw = torch.Generator().manual_seed(7)
        logits = torch.randn((num, self.vocab_size), generator=draw)
        for is_cut in (False, True):
            info = self._info((0, 1, 2), is_cut)
            found = self._draw(logits, info, [*self.index])
            for k, i in enumerate(self.index):
                own = self._draw(logits[k : k + 1], self._info((i,), is_cut), [0])
                num_wrong += own != found[k : k + 1]
        return num_wrong / (2 * num), 0.0

    def _draw(self, logits: Tensor, info: Any, index: list[int]) -> list[int]:
        device = self.runner.device
        tokens, _ = sample_rows(
            self.runner,
            logits.to(device, copy=True),
            sampling_info=expand_rows(info, index, device),
            positions=torch.arange(3, 3 + len(index), device=device),
            grammar_mask=None,
            needs=TokenNeeds(False, [], []),
        )
        drawn: list[int] = tokens.tolist()
        return drawn

    def _info(self, requests: Sequence[int], is_cut: bool) -> Any:
        """is_cut: whether they ask for top-k and top-p, which are drawn otherwise."""
        device, num = self.runner.device, len(requests)
        ones = torch.ones(num, device=device)
        temperatures = [[0.7 + 0.3 * i] for i in requests]
        bias = torch.zeros(num, self.vocab_size, device=device)
        bias[range(num), list(requests)] = 1e4
        return SamplingBatchInfo(
            temperatures=torch.tensor(temperatures, device=device),
            top_ps=(0.9 if is_cut else 1.0) * ones,
            top_ks=(40 if is_cut else 1 << 30) * ones.to(torch.int32),
            min_ps=0 * ones,
            is_all_greedy=False,
            is_any_greedy=False,
            need_top_p_sampling=is_cut,
            need_top_k_sampling=is_cut,
            need_min_p_sampling=False,
            vocab_size=self.vocab_size,
            logit_bias=bias,
            device=str(device),
        )
