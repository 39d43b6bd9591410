"""The stages of a round that look at the target: segment, verify, score, follow.

They hold models, tables and slots, and nothing of any request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_parse.commit import SampledRows
from sglang_parse.config import ParseConfig
from sglang_parse.decide import (
    Cut,
    Decision,
    choose_cut,
    decide,
    exact_cut,
    verdict_scores,
)
from sglang_parse.grammar import GrammarChain, mask_for_rows
from sglang_parse.judge import JudgePrompt, build_judge_prompt
from sglang_parse.memory import RoundSlots
from sglang_parse.pinned import pinned_agreement, pinned_verdicts
from sglang_parse.plan import VerifyPlan
from sglang_parse.request import REST
from sglang_parse.sampling import (
    LogprobNeeds,
    expand_rows,
    join_outputs,
    sample_rows,
)
from sglang_parse.segment import Segmenter, build_token_texts, thin
from sglang_parse.state import RequestState, RoundDraft
from sglang_parse.verify import PassOutput, TargetVerifier

# Committed text the segmenter sees before the segment that the draft begins or ends.
SEAM_TOKENS = 48
# Requests name segmenters and questions as they like; so many of each are kept.
NUM_CACHED = 64
# Rows of the target's logits asked for in one call, over all requests; and the least
# and most of one request.
WAVE_ROWS = 512
WAVE_WIDTH = (8, 32)


def wave_width(num_requests: int) -> int:
    """Rows of each request whose logits are computed in one call."""
    least, most = WAVE_WIDTH
    return min(max(least, WAVE_ROWS // num_requests), most)


@dataclass(frozen=True)
class Segments:
    """The drafts of a round, cut.

    boundaries: per request, those to judge. head_ends: per request the end of the
    leading draft tokens that only the target can confirm: those of segments it recovers
    and those the EAGLE-3 head wrote; all of them where the round is not judged.
    mean_len: tokens of a segment, judged on its own or not; 0 without one.
    """

    boundaries: list[tuple[int, ...]]
    head_ends: list[int]
    mean_len: float


class TargetStages:
    """vocab_size: the model's, at least the tokenizer's. Raises ValueError where the
    configured segmenter or judge suffix cannot serve this tokenizer."""

    def __init__(
        self,
        config: ParseConfig,
        verifier: TargetVerifier,
        tokenizer: Any,
        vocab_size: int,
    ) -> None:
        self.config = config
        self.verifier = verifier
        self.tokenizer = tokenizer
        self.slots: RoundSlots  # set once SGLang has made the pools
        self.pinned = pinned_verdicts()
        self.pinned_agreement = pinned_agreement()
        texts = build_token_texts(tokenizer)
        # Model vocabularies are padded beyond the tokenizer's.
        self._token_texts = texts + [""] * (vocab_size - len(texts))
        self.segmenter = lru_cache(NUM_CACHED)(
            partial(Segmenter, token_texts=self._token_texts)
        )
        self.judge = lru_cache(NUM_CACHED)(self._judge)
        # Fail at start-up, not at the first request.
        self.segmenter(config.segmenter)
        self.judge(config.judge_suffix)

    def _judge(self, question: str) -> JudgePrompt:
        return build_judge_prompt(self.tokenizer, question, self.config.verdict_pairs)

    def segment(
        self,
        batch: Any,
        states: Sequence[RequestState],
        drafts: Sequence[RoundDraft],
        *,
        judged: bool = True,
        judge_every: int = 1,
    ) -> Segments:
        """Cut the drafts, and choose what to judge: as many boundaries as there are
        scratch slots for and rows left in a pass.

        judged: whether the round is. judge_every: boundaries to a verdict of requests
        that do not say themselves.
        """
        semantic = [
            i
            for i, s in enumerate(states)
            if s.options.mode == "semantic" and drafts[i].tokens
        ]
        boundaries: list[tuple[int, ...]] = [()] * len(states)
        head_ends = [0] * len(states)
        if not judged:
            for i in semantic:
                head_ends[i] = len(drafts[i].tokens)
            return Segments(boundaries, head_ends, 0.0)
        num_found = num_tokens = 0
        num_rows = sum(1 + len(d.tokens) for d in drafts)
        rows_left = max(0, self.slots.max_rows - num_rows)
        room = min(self.slots.num_free(batch.tree_cache), rows_left)
        for num_left, i in zip(range(len(semantic), 0, -1), semantic, strict=True):
            state = states[i]
            suffix_len = len(state.suffix)
            most = min(self.config.max_segments, room // num_left // suffix_len)
            recovering, by_head = state.recovering, drafts[i].num_head
            if most == 0 and not recovering and not by_head:
                continue
            before, begun = self._written(batch.reqs[i], state)
            tokens = (*begun, *drafts[i].tokens)
            find = partial(
                self.segmenter(state.options.segmenter).boundaries,
                tokens,
                ended=drafts[i].ended,
                max_segments=len(tokens),
                previous_text=self._text(before),
            )
            found = tuple(b - len(begun) for b in find())
            if recovering:
                ends = find(settled=True)
                whole = recovering > len(ends)
                head_end = len(tokens) if whole else ends[recovering - 1]
                head_ends[i] = max(0, head_end - len(begun))
            head_ends[i] = max(head_ends[i], by_head)
            found = tuple(b for b in found if b > head_ends[i])
            num_found += len(found)
            num_tokens += found[-1] - head_ends[i] if found else 0
            every = state.options.judge_every or judge_every
            if state.num_suspect > head_ends[i] or state.num_client:
                every = 1  # one of them is wrong: which? or they are a client's
            most = min(most, math.ceil(len(found) / every))
            boundaries[i] = thin(found, most) if most else ()
            room -= len(boundaries[i]) * suffix_len
        return Segments(boundaries, head_ends, num_tokens / max(1, num_found))

    def segments_to_recover(
        self, req: Any, state: RequestState, decision: Decision, *, rejected: bool
    ) -> int:
        """How many more segments the target writes itself after this decision.

        rejected: a verdict failed, at the segment behind the `num_judged` tokens. Sets
        `state.num_begun`; a segment may take the target many rounds.
        """
        left = state.options.recover_limit if rejected else state.recovering
        if not left or left > REST // 2:
            state.num_begun = 0
            return left
        before, begun = self._written(req, state)
        tokens = [*begun, *decision.accept_tokens]
        if rejected:
            start = len(begun) + decision.num_judged
            before, tokens = before + tokens[:start], tokens[start:]
        boundaries = self.segmenter(state.options.segmenter).boundaries(
            tokens,
            ended=False,
            max_segments=len(tokens),
            previous_text=self._text(before),
            settled=True,
        )
        left = max(0, left - len(boundaries))
        state.num_begun = len(tokens) - max(boundaries, default=0) if left else 0
        return left

    def scores(
        self, plan: VerifyPlan, output: PassOutput, states: Sequence[RequestState]
    ) -> list[tuple[float, ...]]:
        """Verdict scores per request, one per boundary."""
        scores: list[tuple[float, ...]] = []
        at = 0
        for state, boundaries in zip(states, plan.boundaries, strict=True):
            logits = output.logits[at : at + len(boundaries)]
            at += len(boundaries)
            if not boundaries or state.judge is None:
                scores.append(())
                continue
            values = verdict_scores(logits, state.judge.verdict_ids)
            scores.append(tuple(values.tolist()))
        if self.pinned:
            drafts = zip(plan.boundaries, plan.num_draft_tokens, strict=True)
            return [self.pinned.scores(b, n) for b, n in drafts]
        return scores

    def verify(self, batch: Any, plan: VerifyPlan) -> PassOutput:
        """The pass, its suffixes in scratch slots."""
        scratch = self.slots.take_scratch(batch.tree_cache, plan.num_suffix_tokens)
        try:
            return self.verifier.verify(
                plan,
                req_pool_indices=batch.req_pool_indices,
                scratch=scratch,
                table=self.slots.table,
            )
        finally:
            self.slots.release_scratch(scratch)

    def follow_target(
        self,
        batch: Any,
        plan: VerifyPlan,
        output: PassOutput,
        cuts: Sequence[Cut],
        drafts: Sequence[RoundDraft],
        chains: Sequence[GrammarChain | None],
    ) -> tuple[list[Decision], SampledRows]:
        """Sample the target at the rows the cuts ask for, and decide.

        The LM head runs over a few rows of each request at a time, and on only where
        the target has agreed with the draft so far: never over all rows of a pass.
        """
        asked = [cut.rows for cut in cuts]
        chosen: list[list[int]] = [[] for _ in cuts]
        places: list[list[int]] = [[] for _ in cuts]
        outputs: list[LogitsProcessorOutput] = []
        most = max(map(len, asked))
        going = list(range(len(cuts)))
        num_sampled = 0
        while going:
            # A benchmark that pins agreement decides only when it has all rows.
            width = most if self.pinned_agreement else wave_width(len(going))
            owner: list[int] = []
            offset: list[int] = []
            for i in going:
                wave = asked[i][len(chosen[i]) : len(chosen[i]) + width]
                owner += [i] * len(wave)
                offset += wave
            tokens, sampled = self._sample(batch, plan, output, owner, offset, chains)
            outputs.append(sampled)
            agreeing = dict.fromkeys(going, True)
            for i, j, token in zip(owner, offset, tokens, strict=True):
                chosen[i].append(token)
                places[i].append(num_sampled)
                num_sampled += 1
                agreeing[i] &= drafts[i].tokens[j : j + 1] == (token,)
            going = [
                i
                for i in going
                if len(chosen[i]) < len(asked[i])
                and (agreeing[i] or self.pinned_agreement)
            ]
        decisions = [
            decide(cut, draft.tokens, self._agreed(cut, draft, own))
            for cut, draft, own in zip(cuts, drafts, chosen, strict=True)
        ]
        return decisions, SampledRows(
            places, join_outputs(outputs), output.hidden_states, plan.root_rows
        )

    def _sample(
        self,
        batch: Any,
        plan: VerifyPlan,
        output: PassOutput,
        owner: Sequence[int],
        offset: Sequence[int],
        chains: Sequence[GrammarChain | None],
    ) -> tuple[list[int], LogitsProcessorOutput]:
        """The target's own tokens behind `offset` draft tokens of the requests
        `owner`."""
        device = batch.seq_lens.device
        pairs = list(zip(owner, offset, strict=True))
        positions = [plan.seq_lens[i] + j for i, j in pairs]
        rows = [plan.root_rows[i] + j for i, j in pairs]
        tokens, sampled = sample_rows(
            self.verifier.runner,
            self.verifier.logits_at(output, rows),
            sampling_info=expand_rows(batch.sampling_info, list(owner), device),
            positions=torch.tensor(positions, device=device),
            grammar_mask=mask_for_rows(chains, owner, offset),
            needs=logprob_needs(batch, owner),
        )
        chosen: list[int] = tokens.tolist()
        return chosen, sampled

    def _agreed(self, cut: Cut, draft: RoundDraft, chosen: list[int]) -> list[int]:
        """The target's tokens at the cut's rows; a benchmark may pin those where the
        draft's beginning is followed."""
        followed = cut.head_end
        if not (cut.head_end or cut.num_kept or cut.rejected_end):
            followed = cut.tail_end
        if not self.pinned_agreement or not followed:
            return chosen
        return self.pinned_agreement.follow(draft.tokens[:followed], chosen)

    def _written(self, req: Any, state: RequestState) -> tuple[list[int], list[int]]:
        """The last committed tokens: SEAM_TOKENS of them, and behind these what a
        recovering target has written of a segment."""
        reach = self.segmenter(state.options.segmenter).reach
        num_begun = min(state.num_begun, reach)
        most = SEAM_TOKENS + num_begun
        tokens = [*req.output_ids[-most:], *state.ready][-most:]
        start = len(tokens) - num_begun
        return tokens[:start], tokens[start:]

    def _text(self, tokens: Sequence[int]) -> str:
        return "".join(self._token_texts[t] for t in tokens)


def shown_tokens(
    drafts: Sequence[RoundDraft], boundaries: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """The draft tokens that the target is to see.

    Behind the last boundary nothing can be kept in this round, whatever the verdicts:
    those tokens wait for a boundary of their own and would be forwarded again then.
    """
    return [
        draft.tokens[: ends[-1]] if ends else draft.tokens
        for draft, ends in zip(drafts, boundaries, strict=True)
    ]


def choose_cuts(
    plan: VerifyPlan,
    scores: Sequence[Sequence[float]],
    states: Sequence[RequestState],
    drafts: Sequence[RoundDraft],
    head_ends: Sequence[int],
) -> list[Cut]:
    """One cut per request, by its own mode, threshold and keep rule.

    drafts: whole ones, with what the pass does not hold (`shown_tokens`).
    """
    cuts = []
    for i, state in enumerate(states):
        options, num_draft = state.options, len(drafts[i].tokens)
        if options.mode != "semantic":
            cuts.append(exact_cut(num_draft))
            continue
        cuts.append(
            choose_cut(
                scores[i],
                plan.boundaries[i],
                num_draft_tokens=num_draft,
                threshold=options.threshold,
                keep_rule=options.keep_rule,
                exact_tail=options.exact_tail,
                head_end=head_ends[i],
            )
        )
    return cuts


def logprob_needs(batch: Any, owner: Sequence[int]) -> LogprobNeeds:
    """The batch's logprob requests, a row per sampled row."""
    if not batch.return_logprob:
        return LogprobNeeds(False, [], [])
    return LogprobNeeds(
        return_logprob=True,
        top_logprobs_nums=[batch.top_logprobs_nums[i] for i in owner],
        token_ids_logprobs=[batch.token_ids_logprobs[i] for i in owner],
    )
