"""Committed tokens -> DraftProposal: the draft model writes ahead.

Its decode steps are a rolling batch: a request joins with the tokens that the model has
not read yet, and leaves when its draft is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from torch import Tensor

from sglang_parse.drafting.draft_head import DraftHead, HeadGuesses
from sglang_parse.drafting.drafter import DrafterContext
from sglang_parse.drafting.guessed_steps import write_guessed
from sglang_parse.drafting.guesses import GuessTable
from sglang_parse.drafting.lanes import DraftPhase, DraftRequest, Lane, Lanes
from sglang_parse.drafting.runner import DraftRunner
from sglang_parse.drafting.spans import read_ends, split_spans
from sglang_parse.drafting.token_steps import write_plainly
from sglang_parse.drafting.vocabularies import SAME, TokenizerMatch
from sglang_parse.sgl.capacity import longest_prefill
from sglang_parse.sgl.compat.graph_changes import shown_by_steps
from sglang_parse.sgl.fast_paths import GUESSED_ROWS
from sglang_parse.sgl.sampling import draft_rows
from sglang_parse.sgl.upload import upload

# Missing tokens up to which they are read by draft steps, beside requests that draft.
# An extend of so few tokens takes as long as some steps, since no graph captures it.
MOST_LEAD = 4
# Where guesses do not pay, requests of a phase whose tokens are learnt from, at about
# 4 us a token.
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

    #: None where a head guesses, and with `--speculative-parse-draft-compose none`.
    guesses: GuessTable | None = None
    #: None without `eagle3` or `mtp` of `--speculative-parse-draft-compose`.
    head: DraftHead | None = None
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
        if context.config.draft_guesser == "ngram":
            self.guesses = GuessTable()
        self.reach = int(self.runner.model_config.context_len)
        self.head = DraftHead.create(context, self)

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        super().alloc_memory_pool(**kwargs)
        if self.head is not None:
            self.head.model.alloc_memory_pool(**kwargs)

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        if self.head is not None:
            self.head.model.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        if self.head is None:
            super().init_cuda_graphs()
            return
        self.head.model.check_room()
        with shown_by_steps():
            super().init_cuda_graphs()
        self.head.model.init_cuda_graphs()

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
        lanes, by_head = Lanes(), 0
        if self.head is not None and not any(r.grammar for r, _ in writing):
            by_head = self.head.choose(len(writing))
        with draft_tp_context(self.layout), draft_pp_context():
            self._read(requests, ends, table, by_head > 0)
            if writing:
                lanes = self._write(writing, table, sampling_info, phase, by_head)
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
        self,
        requests: Sequence[DraftRequest],
        ends: Sequence[int],
        table: Tensor,
        by_head: bool,
    ) -> None:
        """Forward the tokens of each text up to `ends`, as far as its KV lacks them.

        Unrotated ids stand at true positions (unlike EAGLE's draft extend). Whole
        prompts may be among them: no forward is longer than a prefill. by_head: whether
        its head reads them too.
        """
        spans = [(r.num_cached, end) for r, end in zip(requests, ends, strict=True)]
        for parts in split_spans(spans, self.longest_extend):
            if not parts:
                continue
            ids = [
                self.readable(t)
                for i, start, end in parts
                for t in requests[i].tokens[start:end]
            ]
            rows = upload([requests[i].row for i, _, _ in parts], table.device)
            starts = [start for _, start, _ in parts]
            lens = [end - start for _, start, end in parts]
            if self.head is None or not by_head:
                self.extend(ids, rows, starts, lens, table)
                continue
            with self.showing(CaptureHiddenMode.FULL):
                output = self.extend(ids, rows, starts, lens, table)
            behind = [requests[i].tokens[s + 1 : e + 1] for i, s, e in parts]
            read = [
                (requests[i].row, sum(lens[:k]), start, behind[k])
                for k, (i, start, _) in enumerate(parts)
            ]
            follow = partial(self.head.follow, read, output, table)
            self.paths.run(GUESSED_ROWS, follow, lambda: [])

    def _write(
        self,
        writing: Sequence[tuple[DraftRequest, int]],
        table: Tensor,
        sampling_info: Any,
        phase: DraftPhase,
        by_head: int,
    ) -> Lanes:
        """The draft of each request with its lead (`Lane`), by guesses or plainly.
        by_head: guesses of the head for each lane in a step."""

        def by(write: Callable[..., None]) -> Lanes:
            lanes = Lanes(Lane(r, lead) for r, lead in writing)
            write(lanes, table, sampling_info, phase)
            return lanes

        plain, guesses = partial(by, partial(write_plainly, self)), self.guesses
        has_grammar = any(r.grammar for r, _ in writing)
        if self.head is not None and not has_grammar:
            write = plain
            if by_head:
                guessed = partial(by, partial(self._write_by_head, by_head))
                write = partial(self.paths.run, GUESSED_ROWS, guessed, plain)
            return self.head.timed(by_head, table.device, write)
        if guesses is None:
            return plain()
        if not guesses.pays or has_grammar:
            lanes = plain()
        else:
            by_table = partial(write_guessed, self, guess=guesses.look_up)
            lanes = self.paths.run(GUESSED_ROWS, partial(by, by_table), plain)
        for lane in lanes if guesses.pays else lanes[:MOST_LEARNT]:
            guesses.learn(lane.request.tokens, lane.tokens)
        return lanes

    def _write_by_head(
        self,
        most: int,
        lanes: Lanes,
        table: Tensor,
        sampling_info: Any,
        phase: DraftPhase,
    ) -> None:
        """most: guesses of its head for each lane in a step."""
        assert self.head is not None
        guesses = HeadGuesses(self.head, most, table)
        with self.showing(CaptureHiddenMode.LAST):
            write_guessed(
                *(self, lanes, table, sampling_info, phase),
                guess=guesses.guess,
                follow=guesses.follow,
            )

    def sampling_of(self, lanes: Sequence[Lane], info: Any, device: Any) -> Any:
        """Sampling parameters with a row for each entry of `lanes`."""
        return draft_rows(info, [one.request.batch_index for one in lanes], device)

    def shared(self, logits: Tensor) -> Tensor:
        """[rows, vocab] without what the target does not share."""
        if logits.shape[-1] > self.vocab_size:
            logits = logits[:, : self.vocab_size].contiguous()
        if self.unshared:
            logits[:, self._masked] = -torch.inf
        return logits

    def readable(self, token: int) -> int:
        """The token, or another where the draft has no row for it: the target's padding
        may be longer, and requests, biases and temperatures reach into it."""
        if token in self.unshared:
            return self.neutral
        return token if token < self.num_embeddings else 0

    def sample(self, logits: Tensor, position: Tensor, sampling: Any) -> Tensor:
        """[bs] int64 draft tokens, by the request's own sampling parameters."""
        if sampling.is_all_greedy and not sampling.grammars:
            return logits.argmax(dim=-1)
        output = LogitsProcessorOutput(next_token_logits=logits)
        sampler = self.runner.sampler
        return sampler(output, sampling, False, [], [], position).to(torch.int64)
