"""Clients' texts judged right behind their prompts, before anything is sent.

A draft of the draft model follows the target's first token; a client's text follows
the prompt. So its pass starts at the prompt's last token, as the last part of the
prefill.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from sglang_parse.drafters import FollowUp
from sglang_parse.metrics import RoundRecord
from sglang_parse.plan import build_verify_plan
from sglang_parse.ranks import Ranks
from sglang_parse.request import MAX_VERIFY_SEGMENTS
from sglang_parse.request_states import refuse, turn_away
from sglang_parse.sampling import expand_rows
from sglang_parse.stages import TargetStages, choose_cuts
from sglang_parse.state import RequestState, RoundDraft
from sglang_parse.turns import longest_draft
from sglang_parse.window import draft_window, fit_windows

# Rows that one text may take in all its passes, which are one step of the scheduler, in
# which it serves nobody else: eight prefills of 8192 tokens.
MAX_VERIFY_ROWS = 1 << 16


@dataclasses.dataclass(frozen=True)
class ClientJudge:
    """stages, ranks: the worker's. context_len: of the target, in tokens."""

    stages: TargetStages
    ranks: Ranks
    context_len: int

    def judge(
        self,
        batch: Any,
        index: Sequence[int],
        states: Sequence[RequestState],
        next_token_ids: Tensor,
    ) -> list[FollowUp]:
        """Judge the texts of some requests of a prefill batch, as many a pass as fit.

        index: the requests, by their place in the batch; states: theirs. The kept
        part becomes the request's output: its first token now (next_token_ids, [bs],
        is written), the rest with the next round (`RequestState.ready`). Returns what
        the drafters have to know of it.
        """
        follow_ups = []
        at = 0
        while at < len(index):
            slots = self.stages.slots
            room = min(slots.num_free(batch.tree_cache), slots.max_rows)
            rows = [1 + len(s.client.tokens) + len(s.suffix) for s in states[at:]]
            end = at + num_fitting(rows, room)
            now = index[at:end]
            view = batch_view(batch, now)
            follow_ups += self._judge(view, now, states[at:end], next_token_ids)
            at = end
        return follow_ups

    def _judge(
        self,
        view: Any,
        index: Sequence[int],
        states: Sequence[RequestState],
        next_token_ids: Tensor,
    ) -> list[FollowUp]:
        """One pass, or several for texts to verify alone. view: of the batch."""
        seq_lens = [len(req.origin_input_ids) - 1 for req in view.reqs]
        drafts, boundaries = self._drafts(view, states, seq_lens)
        for i, req in enumerate(view.reqs):
            if req.to_finish is not None:
                boundaries[i] = ()  # it gets an error: nothing is read of its verdicts
        slots = self.stages.slots
        room = slots.num_free(view.tree_cache) // len(states)
        alone = slots.allocator.size - sum(r.kv.kv_allocated_len for r in view.reqs)
        for i, state in enumerate(states):
            if room >= len(state.suffix):
                continue
            boundaries[i] = ()  # as in a round: what cannot be judged is not kept
            if not state.options.verify_only or view.reqs[i].to_finish is not None:
                continue
            reason = (
                f"the judge suffix has {len(state.suffix)} tokens and there is room"
            )
            if len(state.suffix) > alone:
                refuse(
                    view.reqs[i],
                    f"{reason} for {alone} behind this text; shorten "
                    "custom_params.parse_judge_suffix.",
                )
            else:
                turn_away(
                    view.reqs[i],
                    f"{reason} for {room} beside the requests that run now; send the "
                    "request again later.",
                )
        num_rows = sum(1 + len(d.tokens) for d in drafts)
        most = (slots.max_rows - num_rows) // len(states)
        groups = [
            verify_groups(b, room=min(room, most), suffix_len=len(s.suffix))
            for b, s in zip(boundaries, states, strict=True)
        ]
        for i, state in enumerate(states):
            req, suffix_len = view.reqs[i], len(state.suffix)
            num = num_verify_rows(groups[i], len(drafts[i].tokens), suffix_len)
            if num <= MAX_VERIFY_ROWS:
                continue
            if not state.options.verify_only:
                groups[i] = groups[i][:1]  # what cannot be judged is not kept
                boundaries[i] = groups[i][0]
                continue
            alone = verify_groups(boundaries[i], room=most, suffix_len=suffix_len)
            reason = (
                f"custom_params.parse_verify asks for {len(boundaries[i])} verdicts, "
                f"which take {len(groups[i])} passes over the text"
            )
            if num_verify_rows(alone, len(drafts[i].tokens), suffix_len) < num:
                turn_away(req, f"{reason} now; send the request again later.")
            else:
                refuse(
                    req,
                    f"{reason}; expected at most {MAX_VERIFY_ROWS} rows in all: give "
                    "fewer segments or a shorter custom_params.parse_judge_suffix.",
                )
            boundaries[i], groups[i] = (), [()]
        scores: list[tuple[float, ...]] = [()] * len(states)
        for k in range(max(map(len, groups))):
            now = [g[k] if k < len(g) else () for g in groups]
            shown = [
                d.tokens if k == 0 else d.tokens[: b[-1] if b else 0]
                for d, b in zip(drafts, now, strict=True)
            ]
            plan = build_verify_plan(
                seq_lens=seq_lens,
                bonus_tokens=[req.origin_input_ids[-1] for req in view.reqs],
                draft_tokens=shown,
                boundaries=now,
                suffix_tokens=[s.suffix for s in states],
            )
            output = self.stages.verify(view, plan)
            found = self.ranks.agree_all(self.stages.scores(plan, output, states))
            scores = [a + b for a, b in zip(scores, found, strict=True)]
            if k == 0:
                first_plan, first_output = plan, output
        plan = dataclasses.replace(first_plan, boundaries=tuple(map(tuple, boundaries)))
        cuts = choose_cuts(plan, scores, states, drafts, [0] * len(states))
        cuts = [
            dataclasses.replace(c, tail_end=c.num_kept) if s.options.verify_only else c
            for c, s in zip(cuts, states, strict=True)
        ]
        decisions, _ = self.stages.follow_target(
            view, plan, first_output, cuts, drafts, [None] * len(states)
        )
        keep, follow_ups = [], []
        rows = view.req_pool_indices.tolist()
        for i, state in enumerate(states):
            decision = decisions[i]
            emitted = decision.accept_tokens
            if state.options.verify_only:
                emitted = ()
            else:
                state.recovering = self.stages.segments_to_recover(
                    view.reqs[i],
                    state,
                    decision,
                    rejected=cuts[i].failed_at_verdict(decision),
                )
                next_token_ids[index[i]] = emitted[0]
                state.ready = emitted[1:]
                state.pending = decision.pending
                state.num_client = len(decision.pending)
            state.report.record(
                RoundRecord(
                    output_len=0,
                    accept_tokens=emitted,
                    draft_tokens=drafts[i].tokens,
                    num_client=len(drafts[i].tokens),
                    boundaries=boundaries[i],
                    scores=scores[i],
                    num_judged=decision.num_judged,
                    num_matched=decision.num_matched,
                    num_passes=len(groups[i]),
                )
            )
            end = seq_lens[i] + 1 + len(emitted)
            root = first_plan.root_rows[i]
            follow_ups.append(
                FollowUp(
                    rows[i],
                    state,
                    seq_lens[i],
                    emitted,
                    first_output.features_at(root, len(emitted)),
                )
            )
            keep.append(end + len(state.pending))
        self.stages.slots.trim_rows(view, keep)
        return follow_ups

    def _drafts(
        self, view: Any, states: Sequence[RequestState], seq_lens: Sequence[int]
    ) -> tuple[list[RoundDraft], list[tuple[int, ...]]]:
        """Clients' texts as drafts, cut to what fits, with slots and boundaries."""
        slots = self.stages.slots
        wanted = [
            draft_window(
                len(s.client.tokens)
                if s.options.verify_only
                else min(len(s.client.tokens), longest_draft(req)),
                num_remaining=(1 << 30)
                if s.options.verify_only
                else req.sampling_params.max_new_tokens,
                num_positions=self.context_len - n - 1 - len(s.suffix),
            )
            for req, s, n in zip(view.reqs, states, seq_lens, strict=True)
        ]
        held = [r.kv.kv_allocated_len for r in view.reqs]
        # Behind a text that is kept whole comes a token that SGLang, which knows of the
        # prompt alone, reserves no slot for.
        fit = partial(
            fit_windows,
            wanted,
            seq_lens=[n + 1 for n in seq_lens],
            held=held,
            max_rows=slots.max_rows,
        )
        windows = fit(room=slots.num_free(view.tree_cache))
        alone = fit(room=slots.allocator.size - sum(held))
        drafts, boundaries = [], []
        for req, state, window, most in zip(
            view.reqs, states, windows, alone, strict=True
        ):
            tokens = state.client.tokens[:window]
            complete = window == len(state.client.tokens)
            if state.options.verify_only and window < most == len(state.client.tokens):
                turn_away(
                    req,
                    f"custom_params.parse_verify has {len(state.client.tokens)} tokens "
                    f"and there is room for {window} beside the requests that run now; "
                    "send the request again later.",
                )
            elif state.options.verify_only and not complete:
                refuse(
                    req,
                    f"custom_params.parse_verify has {len(state.client.tokens)} tokens "
                    f"and there is room for {most} behind this prompt, in a pass of "
                    f"at most {slots.max_rows} (--chunked-prefill-size); shorten it.",
                )
            cuts = state.client.cuts
            empty = first_empty(cuts or ())
            if empty is not None:
                refuse(
                    req,
                    f"custom_params.parse_verify[{empty}] has no tokens under this "
                    "model's tokenizer; leave it out.",
                )
                cuts = ()
            if cuts is None:
                cuts = self.stages.segmenter(state.options.segmenter).boundaries(
                    tokens,
                    ended=complete,
                    max_segments=MAX_VERIFY_SEGMENTS
                    if state.options.verify_only
                    else self.stages.config.max_segments,
                )
            drafts.append(RoundDraft(tokens, complete, num_client=len(tokens)))
            boundaries.append(tuple(b for b in cuts if b <= window))
        self.stages.slots.extend_rows(
            view, [n + 1 + w + bool(w) for n, w in zip(seq_lens, windows, strict=True)]
        )
        return drafts, boundaries


def num_verify_rows(
    groups: Sequence[Sequence[int]], num_tokens: int, suffix_len: int
) -> int:
    """Rows of all passes over one text: the first holds all of it, the others each the
    part up to their last boundary."""
    rows = sum((b[-1] if b else 0) + suffix_len * len(b) for b in groups[1:])
    return rows + 1 + num_tokens + suffix_len * len(groups[0])


def num_fitting(sizes: Sequence[int], room: int) -> int:
    """How many of the first fit together, but for the quarter that `fit_windows` leaves
    for judge suffixes; at least one."""
    total = 0
    for num, size in enumerate(sizes):
        total += size
        if num and total > room * 3 // 4:
            return num
    return len(sizes)


def first_empty(cuts: Sequence[int]) -> int | None:
    """The first of the segments ending at `cuts` that has no tokens."""
    starts = (0, *cuts)
    pairs = enumerate(zip(starts, cuts, strict=False))
    return next((k for k, (start, end) in pairs if start == end), None)


def batch_view(batch: Any, index: Sequence[int]) -> Any:
    """Some requests of a batch, as the stages read a batch."""
    return SimpleNamespace(
        reqs=[batch.reqs[i] for i in index],
        req_pool_indices=batch.req_pool_indices[list(index)],
        seq_lens=batch.seq_lens[list(index)],
        sampling_info=expand_rows(batch.sampling_info, list(index), batch.device),
        tree_cache=batch.tree_cache,
        device=batch.device,
        return_logprob=False,
    )


def verify_groups(
    boundaries: Sequence[int], *, room: int, suffix_len: int
) -> list[tuple[int, ...]]:
    """Boundaries pass by pass, as many a pass as there are scratch slots for.

    room: scratch slots, at least suffix_len where there is a boundary.
    """
    most = max(1, room // suffix_len)
    groups = [tuple(boundaries[k : k + most]) for k in range(0, len(boundaries), most)]
    return groups or [()]
