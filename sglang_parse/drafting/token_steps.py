"""Draft steps of one token a request, which the host launches ahead of the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_parse.drafting.lanes import DraftPhase, Lanes
from sglang_parse.sgl.readback import StepTokens
from sglang_parse.sgl.upload import upload

if TYPE_CHECKING:
    from sglang_parse.drafting.draft_model import DraftModel


def write_plainly(
    model: DraftModel,
    lanes: Lanes,
    table: Tensor,
    sampling_info: Any,
    phase: DraftPhase,
) -> None:
    """Draft steps for all lanes at once. table: req_to_token.

    A step forwards one token of each lane: first those of its text that the model
    has not read, then what the step before has drafted.
    """
    device = table.device
    sampling = model.sampling_of(lanes, sampling_info, device)
    # Positions are kept on the host too, so that no step asks the device for them.
    position_cpu = torch.tensor([lane.start for lane in lanes])
    end_cpu = torch.tensor([lane.end for lane in lanes])
    most = max(lane.lead for lane in lanes)
    leads = [[model.readable(t) for t in lane.lead_tokens(most)] for lane in lanes]
    rows_cpu = torch.tensor([lane.request.row for lane in lanes])
    num_leads = torch.tensor([lane.lead for lane in lanes])
    numbers = torch.stack([rows_cpu, position_cpu, end_cpu, num_leads])
    rows, position, end, num_leads = upload(numbers, device)
    given = upload(torch.tensor(leads).T.contiguous(), device)
    input_ids = given[0]
    steps = StepTokens(device)
    while True:
        output = model.decode(input_ids, rows, position, position_cpu, table)
        logits = model.shared(output.next_token_logits)
        num = len(steps) + 1
        chains = [
            (i, lane.request.grammar)
            for i, lane in enumerate(lanes)
            if lane.request.grammar is not None and lane.writes(num)
        ]
        for i, chain in chains:
            chain.mask_next(logits[i : i + 1])
        drafted = model.sample(logits, position, sampling)
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
