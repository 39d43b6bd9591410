"""Committed tokens -> DraftProposal: the draft model writes ahead.

Its decode steps are a rolling batch: a request joins with the tokens that the model has
not read yet, and leaves when its draft is complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from torch import Tensor

from sglang_parse.drafting.drafter import DrafterContext
from sglang_parse.drafting.guesses import RUNS, GuessTable
from sglang_parse.drafting.lanes import DraftPhase, DraftRequest, Lane, Lanes
from sglang_parse.drafting.runner import DraftRunner
from sglang_parse.drafting.spans import read_ends, split_spans
from sglang_parse.drafting.vocabularies import SAME, TokenizerMatch
from sglang_parse.sgl.capacity import longest_prefill
from sglang_parse.sgl.fast_paths import GUESSED_ROWS
from sglang_parse.sgl.readback import StepTokens
from sglang_parse.sgl.sampling import draft_rows
from sglang_parse.sgl.upload import upload

# Missing tokens up to which they are read by draft steps, beside requests that draft.
# An extend of so few tokens takes as long as some steps, since no graph captures it.
MOST_LEAD = 4
# Most guesses of a request in a step; and, where guesses do not pay, requests of a
# phase whose tokens are learnt from, at about 4 us a token.
MOST_GUESSES = 8
MOST_LEARNT = 4


@dataclass(frozen=True)
class DraftProposal:
    """tokens: newly drafted per request, the stop token excluded; none where there is
    more to read first. ended: whether a stop token followed. is_complete: whether the
    draft is as long as it was to be, or has ended; also where there is more to read.
    num_forwarded: sequence positions with draft KV afterwards. num_read: tokens of
    texts that were read before the first step. num_steps: draft steps; with guesses,
    as many as there would have been without them."""

    tokens: tuple[tuple[int, ...], ...]
    ended: tuple[bool, ...]
    is_complete: tuple[bool, ...]
    num_forwarded: tuple[int, ...]
    num_read: int = 0
    num_steps: int = 0


class DraftModel(DraftRunner):
    """The draft model of `--speculative-draft-model-path`.

    vocab_size: of what reads its drafts, in padded rows; it may have more or fewer.
    match: of the two tokenizers; what they do not share is neither drafted nor read.
    """

    #: None without `--speculative-parse-draft-compose ngram`.
    guesses: GuessTable | None = None
    #: Tokens that it reads, its own drafts included.
    reach = 1 << 30

    def __init__(
        self,
        context: DrafterContext,
        *,
        vocab_size: int,
        context_len: int | None,
        match: TokenizerMatch = SAME,
    ) -> None:
        super().__init__(
            context,
            path=context.server_args.speculative_draft_model_path,
            revision=context.server_args.speculative_draft_model_revision,
            flag="--speculative-draft-model-path",
            context_len=context_len,
        )
        self.vocab_size = vocab_size
        self.num_embeddings = self.runner.model_config.vocab_size
        self.set_unshared(match)
        self.longest_extend = longest_prefill()
        if context.config.draft_compose == "ngram":
            self.guesses = GuessTable()
        self.reach = int(self.runner.model_config.context_len)

    def set_unshared(self, match: TokenizerMatch) -> None:
        """Which ids are neither drafted nor read, and what is read in their place."""
        width = min(self.vocab_size, self.num_embeddings)
        self.unshared = match.unshared
        self.neutral = match.neutral
        masked = sorted(i for i in match.unshared if i < width)
        self._masked = torch.tensor(masked, device=self.runner.device)

    def propose(
        self,
        requests: Sequence[DraftRequest],
        *,
        table: Tensor,
        sampling_info: Any,
        phase: DraftPhase,
    ) -> DraftProposal:
        """Go on with the draft of each request until the phase ends.

        Long texts are read first, of all requests together at most `phase.most_read`
        tokens. A request whose text is not read to its end gets no draft, and the next
        phase reads on.

        table: req_to_token; columns [0, len(tokens) + num_new) of each row hold slots.
        """
        spans = [(r.num_cached, len(r.tokens)) for r in requests]
        most = min(phase.most_read, self.longest_extend)
        ends = read_ends(spans, most, lead=MOST_LEAD)
        writing = [
            (r, len(r.tokens) - end)
            for r, end in zip(requests, ends, strict=True)
            if len(r.tokens) - end <= MOST_LEAD
        ]
        lanes = Lanes()
        with draft_tp_context(self.layout), draft_pp_context():
            self._read(requests, ends, table)
            if writing:
                lanes = self._write(writing, table, sampling_info, phase)
        lane_of = {id(lane.request): lane for lane in lanes}
        found = [lane_of.get(id(r)) for r in requests]
        return DraftProposal(
            tokens=tuple(tuple(one.tokens) if one else () for one in found),
            ended=tuple(bool(one and one.ended) for one in found),
            is_complete=tuple(one is None or one.is_complete for one in found),
            num_forwarded=tuple(
                one.start + one.num_forwarded if one else end
                for one, end in zip(found, ends, strict=True)
            ),
            num_read=sum(ends) - sum(start for start, _ in spans),
            num_steps=max((lane.num_forwarded for lane in lanes), default=0),
        )

    def _read(
        self, requests: Sequence[DraftRequest], ends: Sequence[int], table: Tensor
    ) -> None:
        """Forward the tokens of each text up to `ends`, as far as its KV lacks them.

        Unrotated ids stand at true positions (unlike EAGLE's draft extend). Whole
        prompts may be among them: no forward is longer than a prefill.
        """
        spans = [(r.num_cached, end) for r, end in zip(requests, ends, strict=True)]
        for parts in split_spans(spans, self.longest_extend):
            if parts:
                self.extend(
                    [
                        self._readable(t)
                        for i, start, end in parts
                        for t in requests[i].tokens[start:end]
                    ],
                    upload([requests[i].row for i, _, _ in parts], table.device),
                    [start for _, start, _ in parts],
                    [end - start for _, start, end in parts],
                    table,
                )

    def _write(
        self,
        writing: Sequence[tuple[DraftRequest, int]],
        table: Tensor,
        sampling_info: Any,
        phase: DraftPhase,
    ) -> Lanes:
        """The draft of each request with its lead (`Lane`), by guesses or plainly."""

        def by(write: Callable[..., None]) -> Lanes:
            lanes = Lanes(Lane(r, lead) for r, lead in writing)
            write(lanes, table, sampling_info, phase)
            return lanes

        plain, guesses = partial(by, self._write_plainly), self.guesses
        if guesses is None:
            return plain()
        if not guesses.pays or any(r.grammar for r, _ in writing):
            lanes = plain()
        else:
            guessed = partial(by, self._write_guessed)
            lanes = self.paths.run(GUESSED_ROWS, guessed, plain)
        for lane in lanes if guesses.pays else lanes[:MOST_LEARNT]:
            guesses.learn(lane.request.tokens, lane.tokens)
        return lanes

    def _write_plainly(
        self, lanes: Lanes, table: Tensor, sampling_info: Any, phase: DraftPhase
    ) -> None:
        """Draft steps for all lanes at once.

        A step forwards one token of each lane: first those of its text that the model
        has not read, then what the step before has drafted.
        """
        device = table.device
        sampling = self._sampling_of(lanes, sampling_info, device)
        # Positions are kept on the host too, so that no step asks the device for them.
        position_cpu = torch.tensor([lane.start for lane in lanes])
        end_cpu = torch.tensor([lane.end for lane in lanes])
        most = max(lane.lead for lane in lanes)
        leads = [[self._readable(t) for t in lane.lead_tokens(most)] for lane in lanes]
        rows_cpu = torch.tensor([lane.request.row for lane in lanes])
        num_leads = torch.tensor([lane.lead for lane in lanes])
        numbers = torch.stack([rows_cpu, position_cpu, end_cpu, num_leads])
        rows, position, end, num_leads = upload(numbers, device)
        given = upload(torch.tensor(leads).T.contiguous(), device)
        input_ids = given[0]
        steps = StepTokens(device)
        while True:
            logits = self._logits(input_ids, rows, position, position_cpu, table)
            num = len(steps) + 1
            chains = [
                (i, lane.request.grammar)
                for i, lane in enumerate(lanes)
                if lane.request.grammar is not None and lane.writes(num)
            ]
            for i, chain in chains:
                chain.mask_next(logits[i : i + 1])
            drafted = self._sample(logits, position, sampling)
            steps.add(drafted)
            lanes.see(steps.all() if chains else steps.known())
            num_done = sum(lane.is_done(num) for lane in lanes)
            if lanes.is_over(num, num_done, phase):
                break
            # A lane at the end of its window repeats its last step in place.
            input_ids = torch.where(position < end, drafted, input_ids)
            if num < most:
                input_ids = torch.where(num < num_leads, given[num], input_ids)
            position = torch.minimum(position + 1, end)
            position_cpu = torch.minimum(position_cpu + 1, end_cpu)
        lanes.see(steps.all())
        for lane in lanes:
            lane.num_forwarded = min(len(steps), lane.end + 1 - lane.start)

    def _write_guessed(
        self, lanes: Lanes, table: Tensor, sampling_info: Any, phase: DraftPhase
    ) -> None:
        """As `_write_plainly`, in fewer steps.

        A step has a row for each token of a lane that the model has not read, and one
        for each guess behind them. What the model writes in place of a guess counts, so
        the draft is the same; where both agree, the next row counts too.
        """
        device = table.device
        while True:
            chains = self._chains(lanes)
            owner = [lane for lane, tokens, _ in chains for _ in tokens]
            ids = [self._readable(t) for _, tokens, _ in chains for t in tokens]
            places = [
                lane.start + lane.num_forwarded + k
                for lane, tokens, _ in chains
                for k in range(len(tokens))
            ]
            position_cpu = torch.tensor(places)
            rows, position, input_ids = upload(
                torch.tensor([[one.request.row for one in owner], places, ids]), device
            )
            logits = self._logits(input_ids, rows, position, position_cpu, table)
            sampling = self._sampling_of(owner, sampling_info, device)
            found = self._sample(logits, position, sampling).tolist()
            for lane, tokens, num_guesses in chains:
                lane.follow(tokens, found[: len(tokens)], num_guesses)
                del found[: len(tokens)]
            num_done = sum(lane.is_complete for lane in lanes)
            depth = max(lane.num_forwarded for lane in lanes)
            if lanes.is_over(depth, num_done, phase):
                return

    def _chains(self, lanes: Lanes) -> list[tuple[Lane, list[int], int]]:
        """For each lane that is not complete what a step forwards, and how many of the
        last of these tokens are guesses."""
        assert self.guesses is not None
        unread = [(lane, lane.unread) for lane in lanes if not lane.is_complete]
        graphs = getattr(self.runner, "decode_cuda_graph_runner", None)
        left = math.inf
        if most_rows := getattr(graphs, "max_bs", 0):
            left = max(0, most_rows - sum(len(tokens) for _, tokens in unread))
        chains = []
        for lane, tokens in unread:
            most = min(MOST_GUESSES, lane.request.num_new - len(lane.tokens) - 1, left)
            text = (*lane.request.tokens[-RUNS[0] :], *lane.tokens[-RUNS[0] :])
            found = self.guesses.guess(text, int(most))
            left -= len(found)
            chains.append((lane, [*tokens, *found], len(found)))
        return chains

    def _sampling_of(self, lanes: Sequence[Lane], info: Any, device: Any) -> Any:
        """Sampling parameters with a row for each entry of `lanes`."""
        return draft_rows(info, [one.request.batch_index for one in lanes], device)

    def _logits(
        self,
        input_ids: Tensor,
        rows: Tensor,
        position: Tensor,
        position_cpu: Tensor,
        table: Tensor,
    ) -> Tensor:
        """[rows, vocab] behind each token, without what the target does not share."""
        output = self.decode(input_ids, rows, position, position_cpu, table)
        logits: Tensor = output.next_token_logits
        if logits.shape[-1] > self.vocab_size:
            logits = logits[:, : self.vocab_size].contiguous()
        if self.unshared:
            logits[:, self._masked] = -torch.inf
        return logits

    def _readable(self, token: int) -> int:
        """The token, or another where the draft has no row for it: the target's padding
        may be longer, and requests, biases and temperatures reach into it."""
        if token in self.unshared:
            return self.neutral
        return token if token < self.num_embeddings else 0

    def _sample(self, logits: Tensor, position: Tensor, sampling: Any) -> Tensor:
        """[bs] int64 draft tokens, by the request's own sampling parameters."""
        if sampling.is_all_greedy and not sampling.grammars:
            return logits.argmax(dim=-1)
        output = LogitsProcessorOutput(next_token_logits=logits)
        sampler = self.runner.sampler
        return sampler(output, sampling, False, [], [], position).to(torch.int64)
