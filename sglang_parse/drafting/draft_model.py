"""Committed tokens -> DraftProposal: the draft model writes ahead.

Before it drafts it forwards every committed position its KV lacks, cached prefixes
included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from torch import Tensor

from sglang_parse.drafting.runner import DraftRunner
from sglang_parse.drafting.spans import read_ends, split_spans
from sglang_parse.drafting.vocabularies import SAME, TokenizerMatch
from sglang_parse.requests.ends import TextEnds
from sglang_parse.sgl.capacity import longest_prefill
from sglang_parse.sgl.grammar import GrammarChain
from sglang_parse.sgl.readback import StepTokens
from sglang_parse.sgl.sampling import draft_rows
from sglang_parse.sgl.upload import upload

# Missing tokens up to which catching up is decode steps, where these are captured.
CAPTURED_CATCH_UP = 2


@dataclass(frozen=True)
class DraftRequest:
    """One request's work order.

    row: its row of req_to_token. tokens: committed tokens, bonus and pending draft.
    num_cached: leading tokens whose draft KV is in the pool, less than len(tokens).
    num_new: tokens to draft. stop_ids: tokens that end the response.
    batch_index: its place in the round's sampling info. grammar: constrains the draft.
    """

    row: int
    tokens: Sequence[int]
    num_cached: int
    num_new: int
    stop_ids: frozenset[int]
    batch_index: int
    grammar: GrammarChain | None = None


@dataclass(frozen=True)
class DraftProposal:
    """tokens: newly drafted per request, the stop token excluded; none where there is
    more to read first. ended: whether a stop token followed. num_forwarded: sequence
    positions with draft KV afterwards. num_read: tokens that were read before the first
    one was drafted, beside the last one of each text."""

    tokens: tuple[tuple[int, ...], ...]
    ended: tuple[bool, ...]
    num_forwarded: tuple[int, ...]
    num_read: int = 0


class DraftModel(DraftRunner):
    """The draft model of `--speculative-draft-model-path`.

    vocab_size: the target's, in padded rows; a draft may have more or fewer.
    match: of the two tokenizers; what they do not share is neither drafted nor read.
    """

    def __init__(
        self,
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        context_len: int | None,
        *,
        vocab_size: int,
        match: TokenizerMatch = SAME,
    ) -> None:
        super().__init__(
            server_args,
            gpu_id,
            nccl_port,
            context_len,
            path=server_args.speculative_draft_model_path,
            revision=server_args.speculative_draft_model_revision,
            flag="--speculative-draft-model-path",
        )
        self.vocab_size = vocab_size
        self.num_embeddings = self.runner.model_config.vocab_size
        self.set_unshared(match)
        self.longest_extend = longest_prefill()

    def set_unshared(self, match: TokenizerMatch) -> None:
        """Which ids are neither drafted nor read, and what is read in their place."""
        width = min(self.vocab_size, self.num_embeddings)
        self.unshared = match.unshared
        self.neutral = match.neutral
        masked = sorted(i for i in match.unshared if i < width)
        self._masked = torch.tensor(masked, device=self.runner.device)

    def read_tails(
        self,
        rows: Sequence[int],
        tails: Sequence[Sequence[int]],
        lens: Sequence[int],
        table: Tensor,
    ) -> Tensor:
        """Forward the last tokens of each text; logits [requests, vocab] behind it.

        tails: these tokens. lens: of whole texts, in tokens.
        """
        with draft_tp_context(self.layout), draft_pp_context():
            logits = self._read_tails(upload(rows, table.device), tails, lens, table)
        # A graph writes the next step's logits over these.
        return logits.clone()

    def propose(
        self,
        requests: Sequence[DraftRequest],
        *,
        table: Tensor,
        sampling_info: Any,
        logits: Tensor | None = None,
    ) -> DraftProposal:
        """Draft `num_new` tokens for each request, or fewer up to a stop token.

        At most one prefill's worth of long texts is read first: a request whose text is
        not read to its end gets no draft, and the next round reads on.

        table: req_to_token; columns [0, len(tokens) + num_new) of each row hold slots.
        logits: [requests, vocab] behind each text, where all are read to their ends.
        """
        spans = [(r.num_cached, len(r.tokens)) for r in requests]
        ends = read_ends(spans, self.longest_extend)
        going = [k for k, (_, end) in enumerate(spans) if ends[k] == end]
        chosen = [requests[k] for k in going]
        index = [r.batch_index for r in chosen]
        tokens: list[tuple[int, ...]] = [()] * len(requests)
        ended, num_forwarded = [False] * len(requests), list(ends)
        with draft_tp_context(self.layout), draft_pp_context():
            self._read(requests, ends, table)
            if chosen:
                sampling = draft_rows(sampling_info, index, table.device)
                found = self._propose(chosen, table, sampling, logits)
                for i, k in enumerate(going):
                    tokens[k], ended[k] = found.tokens[i], found.ended[i]
                    num_forwarded[k] = found.num_forwarded[i]
        num_read = sum(ends) - sum(start for start, _ in spans) - len(chosen)
        return DraftProposal(
            tuple(tokens), tuple(ended), tuple(num_forwarded), num_read
        )

    def _read(
        self, requests: Sequence[DraftRequest], ends: Sequence[int], table: Tensor
    ) -> None:
        """Forward a part of each text that is not read to its end in this round."""
        parts = [
            (r, end)
            for r, end in zip(requests, ends, strict=True)
            if r.num_cached < end < len(r.tokens)
        ]
        if parts:
            self.extend(
                [
                    self._readable(t)
                    for r, n in parts
                    for t in r.tokens[r.num_cached : n]
                ],
                upload([r.row for r, _ in parts], table.device),
                [r.num_cached for r, _ in parts],
                [end - r.num_cached for r, end in parts],
                table,
            )

    def _propose(
        self,
        requests: Sequence[DraftRequest],
        table: Tensor,
        sampling: Any,
        logits: Tensor | None = None,
    ) -> DraftProposal:
        device = table.device
        # Positions are kept on the host too, so that no step asks the device for them.
        position_cpu = torch.tensor([len(r.tokens) - 1 for r in requests])
        end_cpu = position_cpu + torch.tensor([r.num_new - 1 for r in requests])
        rows_cpu = torch.tensor([r.row for r in requests])
        last_cpu = torch.tensor([self._readable(r.tokens[-1]) for r in requests])
        numbers = torch.stack([last_cpu, rows_cpu, position_cpu, end_cpu])
        input_ids, rows, position, end = upload(numbers, device)
        chains = [(i, r.grammar) for i, r in enumerate(requests) if r.grammar]
        ends = TextEnds([r.num_new for r in requests], [r.stop_ids for r in requests])
        steps = StepTokens(device)
        if logits is None:
            logits = self._catch_up(requests, rows, table)
        while True:
            if logits.shape[-1] > self.vocab_size:
                logits = logits[:, : self.vocab_size].contiguous()
            if self.unshared:
                logits[:, self._masked] = -torch.inf
            for i, chain in chains:
                chain.mask_next(logits[i : i + 1])
            drafted = self._sample(logits, position, sampling)
            steps.add(drafted)
            if chains:
                chains = _advance(chains, steps.all(), requests, ends)
            ends.see(steps.known())
            if len(steps) >= max(ends.lens):
                break
            # A request at the end of its window repeats its last step in place.
            input_ids = torch.where(position < end, drafted, input_ids)
            position = torch.minimum(position + 1, end)
            position_cpu = torch.minimum(position_cpu + 1, end_cpu)
            logits = self.decode(
                input_ids, rows, position, position_cpu, table
            ).next_token_logits
        ends.see(steps.all())
        written = list(zip(*steps.all(), strict=True))
        whole = [text[:n] for text, n in zip(written, ends.lens, strict=True)]
        ended = tuple(
            bool(set(text[-1:]) & r.stop_ids)
            for text, r in zip(whole, requests, strict=True)
        )
        return DraftProposal(
            tokens=tuple(
                text[:-1] if stopped else text
                for text, stopped in zip(whole, ended, strict=True)
            ),
            ended=ended,
            num_forwarded=tuple(
                len(r.tokens) + min(len(steps), r.num_new) - 1 for r in requests
            ),
        )

    def _catch_up(
        self, requests: Sequence[DraftRequest], rows: Tensor, table: Tensor
    ) -> Tensor:
        """Forward the tokens the draft has no KV for; logits [bs, vocab] at the last.

        Unrotated ids stand at true positions (unlike EAGLE's draft extend). Whole
        prompts may be among them: no forward is longer than a prefill.
        """
        spans = [(r.num_cached, len(r.tokens)) for r in requests]
        most = max(end - start for start, end in spans)
        if most <= CAPTURED_CATCH_UP and self._captures_steps:
            tails = [r.tokens[-most:] for r in requests]
            lens = [len(r.tokens) for r in requests]
            return self._read_tails(rows, tails, lens, table)
        batches = split_spans(spans, self.longest_extend)
        ends_of_texts = []
        for parts in batches:
            index = [i for i, _, _ in parts]
            logits = self.extend(
                [
                    self._readable(t)
                    for i, start, end in parts
                    for t in requests[i].tokens[start:end]
                ],
                rows if len(batches) == 1 else rows[index],
                [start for _, start, _ in parts],
                [end - start for _, start, end in parts],
                table,
            ).next_token_logits
            if len(batches) == 1:
                return logits
            ended = [k for k, (i, _, end) in enumerate(parts) if end == spans[i][1]]
            ends_of_texts.append(logits[ended])
        return torch.cat(ends_of_texts)

    @property
    def _captures_steps(self) -> bool:
        """Whether decode steps replay a graph, which an extend never does."""
        return getattr(self.runner, "decode_cuda_graph_runner", None) is not None

    def _read_tails(
        self,
        rows: Tensor,
        tails: Sequence[Sequence[int]],
        lens: Sequence[int],
        table: Tensor,
    ) -> Tensor:
        """By decode steps for all. A token whose KV is there is computed once more, and
        gives the same."""
        for back in range(max(map(len, tails)), 0, -1):
            nums = [min(back, len(tail)) for tail in tails]
            ids = [self._readable(t[-n]) for t, n in zip(tails, nums, strict=True)]
            position_cpu = torch.tensor(lens) - torch.tensor(nums)
            numbers = torch.stack([torch.tensor(ids), position_cpu])
            input_ids, position = upload(numbers, table.device)
            output = self.decode(input_ids, rows, position, position_cpu, table)
        return output.next_token_logits

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


def _advance(
    chains: Sequence[tuple[int, GrammarChain]],
    steps: Sequence[Sequence[int]],
    requests: Sequence[DraftRequest],
    ends: TextEnds,
) -> list[tuple[int, GrammarChain]]:
    """Walk grammars over the tokens of the last step; those whose draft goes on. A
    draft ends in front of a token that its grammar refuses."""
    going, tokens = [], steps[-1]
    for i, chain in chains:
        if tokens[i] in requests[i].stop_ids:
            continue
        if not chain.advance(tokens[i]):
            ends.lens[i] = len(steps) - 1
        elif len(steps) < requests[i].num_new:
            going.append((i, chain))
    return going
