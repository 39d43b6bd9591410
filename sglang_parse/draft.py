"""Committed tokens -> DraftProposal: the draft model writes ahead.

Before it drafts it forwards every committed position its KV lacks, cached prefixes
included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from torch import Tensor

from sglang_parse.draft_runner import DraftRunner
from sglang_parse.grammar import GrammarChain
from sglang_parse.sampling import draft_rows

# Draft steps between two looks at the tokens on the host; each look costs a device
# synchronisation there and nothing on CPU.
STOP_CHECK_INTERVAL = {"cpu": 1}
DEFAULT_STOP_CHECK_INTERVAL = 8


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
    """tokens: newly drafted per request, the stop token excluded. ended: whether a
    stop token followed. num_forwarded: sequence positions with draft KV afterwards."""

    tokens: tuple[tuple[int, ...], ...]
    ended: tuple[bool, ...]
    num_forwarded: tuple[int, ...]


class DraftModel(DraftRunner):
    """The draft model of `--speculative-draft-model-path`."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, context_len: int
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
        device_type = torch.device(self.runner.device).type
        self.stop_check_interval = STOP_CHECK_INTERVAL.get(
            device_type, DEFAULT_STOP_CHECK_INTERVAL
        )

    def propose(
        self, requests: Sequence[DraftRequest], *, table: Tensor, sampling_info: Any
    ) -> DraftProposal:
        """Draft `num_new` tokens for each request, or fewer up to a stop token.

        table: req_to_token; columns [0, len(tokens) + num_new) of each row hold slots.
        """
        index = [r.batch_index for r in requests]
        sampling = draft_rows(sampling_info, index, table.device)
        with draft_tp_context(self.layout), draft_pp_context():
            return self._propose(requests, table, sampling)

    def _propose(
        self, requests: Sequence[DraftRequest], table: Tensor, sampling: Any
    ) -> DraftProposal:
        device = table.device
        rows = torch.tensor([r.row for r in requests], device=device)
        # Positions are kept on the host too, so that no step asks the device for them.
        position_cpu = torch.tensor([len(r.tokens) - 1 for r in requests])
        end_cpu = torch.tensor([len(r.tokens) + r.num_new - 2 for r in requests])
        position, end = position_cpu.to(device), end_cpu.to(device)
        max_new = max(r.num_new for r in requests)
        drafted: list[list[int]] = [[] for _ in requests]
        ended = [False] * len(requests)
        chains = [(i, r.grammar) for i, r in enumerate(requests) if r.grammar]
        interval = 1 if chains else self.stop_check_interval
        logits = self._catch_up(requests, rows, table)
        columns: list[Tensor] = []
        unread = 0
        pacer = StepPacer(device)
        input_ids = torch.tensor([r.tokens[-1] for r in requests], device=device)
        for step in range(max_new):
            for i, chain in chains:
                if len(drafted[i]) < requests[i].num_new and not ended[i]:
                    chain.mask_next(logits[i : i + 1])
            columns.append(self._sample(logits, position, sampling))
            if step + 1 - unread >= interval or step + 1 == max_new:
                done = _read_back(columns[unread:], requests, drafted, ended)
                unread = len(columns)
                if done:
                    break
            # A request at the end of its window repeats its last step in place.
            input_ids = torch.where(position < end, columns[-1], input_ids)
            position = torch.minimum(position + 1, end)
            position_cpu = torch.minimum(position_cpu + 1, end_cpu)
            pacer.wait()
            logits = self.decode(
                input_ids, rows, position, position_cpu, table
            ).next_token_logits
            pacer.mark()
        steps = len(columns)
        return DraftProposal(
            tokens=tuple(tuple(t) for t in drafted),
            ended=tuple(ended),
            num_forwarded=tuple(
                len(r.tokens) + min(steps, r.num_new) - 1 for r in requests
            ),
        )

    def _catch_up(
        self, requests: Sequence[DraftRequest], rows: Tensor, table: Tensor
    ) -> Tensor:
        """Forward the tokens the draft has no KV for; logits [bs, vocab] at the last.

        Unrotated ids at true positions (unlike EAGLE's draft extend).
        """
        output = self.extend(
            [t for r in requests for t in r.tokens[r.num_cached :]],
            rows,
            [r.num_cached for r in requests],
            [len(r.tokens) - r.num_cached for r in requests],
            table,
        )
        return output.next_token_logits

    def _sample(self, logits: Tensor, position: Tensor, sampling: Any) -> Tensor:
        """[bs] int64 draft tokens, by the request's own sampling parameters."""
        if sampling.is_all_greedy:
            return logits.argmax(dim=-1)
        output = LogitsProcessorOutput(next_token_logits=logits)
        sampler = self.runner.sampler
        return sampler(output, sampling, False, [], [], position).to(torch.int64)


class StepPacer:
    """Keeps the host one draft step ahead of the device, not more.

    One step ahead keeps the device busy. FlashInfer stages the plan of a captured
    step in one page-locked buffer per batch size (flashinfer/decode.py,
    `fast_decode_plan`); planned again before it is copied, a step would attend by the
    plan of a later one. Nothing to pace on CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else torch.get_device_module(device)
        self._running: deque[Any] = deque()

    def wait(self) -> None:
        """Before a step: until the step before the last has finished."""
        if len(self._running) > 1:
            self._running.popleft().synchronize()

    def mark(self) -> None:
        """After a step is launched."""
        if self._device is not None:
            event = self._device.Event()
            event.record()
            self._running.append(event)


def _read_back(
    columns: list[Tensor],
    requests: Sequence[DraftRequest],
    drafted: list[list[int]],
    ended: list[bool],
) -> bool:
    """Append unread columns to `drafted` up to each stop token; True if all are done.

    The only device-to-host copy of the draft loop.
    """
    tokens = torch.stack(columns, dim=1).tolist()
    for i, request in enumerate(requests):
        for token in tokens[i]:
            if ended[i] or len(drafted[i]) >= request.num_new:
                break
            if token in request.stop_ids:
                ended[i] = True
            else:
                drafted[i].append(token)
                if request.grammar is not None:
                    request.grammar.advance(token)
    return all(
        e or len(d) >= r.num_new
        for e, d, r in zip(ended, drafted, requests, strict=True)
    )
