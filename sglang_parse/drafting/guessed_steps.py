"""Draft steps that check guesses: the same drafts in fewer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_parse.drafting.lanes import DraftPhase, Lane, Lanes
from sglang_parse.drafting.token_steps import write_plainly
from sglang_parse.sgl.upload import upload

if TYPE_CHECKING:
    from sglang_parse.drafting.draft_model import DraftModel

# Most guesses of a request in a step.
MOST_GUESSES = 8
# Guesses of some lanes, so many each at most.
Guess = Callable[[Sequence[Lane], Sequence[int]], list[list[int]]]
# Told of each lane that took part in a step where its new KV begins, and the output.
Follow = Callable[[Sequence[tuple[Lane, int, int]], Any], None]


def write_guessed(
    model: DraftModel,
    lanes: Lanes,
    table: Tensor,
    sampling_info: Any,
    phase: DraftPhase,
    *,
    guess: Guess,
    follow: Follow | None = None,
) -> None:
    """As `write_plainly`, in fewer steps.

    A step has a row for each token of a lane that the model has not read, and one for
    each guess behind them. What the model writes in place of a guess counts, so the
    draft is the same; where both agree, the next row counts too.

    follow: told of each step: (lane, its first row, its first position), and the
    model's output.
    """
    device = table.device
    if max(lane.lead for lane in lanes) > most_rows(model.runner):
        write_plainly(model, lanes, table, sampling_info, phase)
        return
    depth = 0
    while True:
        chains = chains_of(model.runner, lanes, guess)
        owner = [lane for lane, tokens, _ in chains for _ in tokens]
        ids = [model.readable(t) for _, tokens, _ in chains for t in tokens]
        places = [
            lane.start + lane.num_forwarded + k
            for lane, tokens, _ in chains
            for k in range(len(tokens))
        ]
        position_cpu = torch.tensor(places)
        rows, position, input_ids = upload(
            torch.tensor([[one.request.row for one in owner], places, ids]), device
        )
        output = model.decode(input_ids, rows, position, position_cpu, table)
        logits = model.shared(output.next_token_logits)
        sampling = model.sampling_of(owner, sampling_info, device)
        found = model.sample(logits, position, sampling).tolist()
        at, read = 0, []
        for lane, tokens, num_guesses in chains:
            read.append((lane, at, lane.start + lane.num_forwarded))
            lane.follow(tokens, found[at : at + len(tokens)], num_guesses)
            at += len(tokens)
        if follow is not None:
            follow(read, output)
        num_done = sum(lane.is_complete for lane in lanes)
        # A step counts for one where the lanes that are furthest are complete.
        depth = max(depth + 1, *(lane.num_forwarded for lane in lanes))
        if lanes.is_over(depth, num_done, phase):
            return


def most_rows(runner: Any) -> int:
    """Rows of a decode step: of the captured ones; without them as many as SGLang's
    backends on a GPU have room to plan, which is one for each request."""
    graphs = getattr(runner, "decode_cuda_graph_runner", None)
    if num := int(getattr(graphs, "max_bs", 0)):
        return num
    is_bounded = runner.device != "cpu"
    return int(runner.req_to_token_pool.size) if is_bounded else 1 << 30


def chains_of(
    runner: Any, lanes: Lanes, guess: Guess
) -> list[tuple[Lane, list[int], int]]:
    """For each lane of a step what it forwards, and how many of the last of these
    tokens are guesses. Lanes that are complete, or for whose unread tokens the step has
    no rows, are left out. runner: of the model."""
    left, unread = most_rows(runner), []
    for lane in sorted(lanes, key=lambda lane: -len(lane.unread)):
        if not lane.is_complete and len(lane.unread) <= left:
            unread.append((lane, lane.unread))
            left -= len(lane.unread)
    most = [
        min(MOST_GUESSES, lane.request.num_new - len(lane.tokens) - 1, left)
        for lane, _ in unread
    ]
    guesses = guess([lane for lane, _ in unread], most)
    chains = []
    for (lane, tokens), found in zip(unread, guesses, strict=True):
        found = found[:left]
        left -= len(found)
        chains.append((lane, [*tokens, *found], len(found)))
    return chains
