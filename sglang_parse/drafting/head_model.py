"""A head of the target: a chain of draft tokens from the target's hidden states.

At position i the head reads the token after it and the target's hidden states there.
Its KV of that pair lies at the slot of position i, so a cached prefix brings it along;
only the pair at the prefix's last position may have been written for another
continuation, which costs a little agreement and never a token: all the head writes is
verified token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.pp_draft_embedding import resolve_draft_embed_and_head
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from sglang.srt.utils import get_available_gpu_memory
from torch import Tensor

from sglang_parse.drafting.drafter import DrafterContext
from sglang_parse.drafting.head_graphs import HeadGraphs, HeadInput
from sglang_parse.drafting.runner import DraftRunner
from sglang_parse.sgl.capacity import check_feature_room, longest_prefill
from sglang_parse.sgl.compat.model_changes import on_device
from sglang_parse.sgl.fast_paths import HEAD_PREFILLS, HEAD_STEPS
from sglang_parse.sgl.upload import upload


@dataclass(frozen=True)
class HeadRows:
    """Committed positions of one request, for the head to follow.

    row: its row of req_to_token. start: first position. tokens: the token after each
    position. features: [len(tokens), features_width] the target's hidden states there.
    """

    row: int
    start: int
    tokens: Sequence[int]
    features: Tensor


@dataclass(frozen=True)
class HeadHint:
    """What the head knows after a request's last position: the likeliest token there
    ([] int64), its chance in the head's opinion ([] float32), and the hidden state
    ([hidden]) from which its next step starts."""

    token: Tensor
    hidden: Tensor
    chance: Tensor


@dataclass(frozen=True)
class Chain:
    """What the head drafts for one request.

    tokens: of the chain. chances: of each token in the head's opinion, if the target
    keeps those before it.
    """

    tokens: tuple[int, ...]
    chances: tuple[float, ...]


@dataclass(frozen=True)
class ChainRequest:
    """One request's work order: its row of req_to_token, the position of its bonus
    token, and how many tokens to draft from the hint."""

    row: int
    position: int
    num_new: int
    hint: HeadHint


class HeadModel(DraftRunner):
    """What all kinds of heads do (heads.py)."""

    #: What `--speculative-parse-compose` calls it, and its name as a drafter.
    name = ""
    #: Tokens that it drafts at a time; 0 where `--speculative-parse-eagle-steps` says.
    most_tokens = 0
    is_head = True
    step_path, prefill_path = HEAD_STEPS, HEAD_PREFILLS
    capture = CaptureHiddenMode.LAST

    def __init__(
        self, context: DrafterContext, *, path: str, revision: str | None, flag: str
    ) -> None:
        """path, revision: of the head, which `flag` names."""
        super().__init__(
            context,
            path=path,
            revision=revision,
            flag=flag,
            context_len=context.context_len,
        )
        self.model = self.runner.model
        self.target = context.target
        self.longest_prefill = longest_prefill()

    def set_width(self, features_width: int) -> None:
        """How wide the hidden states are that it reads of the target."""
        self.features_width = features_width
        self.graphs = HeadGraphs(self.runner, features_width, self.name)

    def takes_lm_head(self) -> bool:
        """Whether the target's LM head is its own."""
        return True

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        super().alloc_memory_pool(**kwargs)
        self._share_embedding()

    def check_room(self) -> None:
        """Raise ValueError where the hidden states of a prefill would not fit beside
        weights and pools."""
        free_gb = get_available_gpu_memory(
            self.target.device, self.target.gpu_id, empty_cache=False
        )
        check_feature_room(
            num_rows=self.longest_prefill,
            width=self.features_width,
            itemsize=self.target.dtype.itemsize,
            free_bytes=int(free_gb * (1 << 30)),
            compose=self.name,
        )

    def _share_embedding(self) -> None:
        """The target's embedding serves the head, and its LM head some kinds
        (sglang/srt/speculative/eagle_worker_v2.py, `init_lm_head`)."""
        embed, head = resolve_draft_embed_and_head(
            target_model=self.target.model,
            draft_model=self.model,
            model_path=self.target.model_config.model_path,
            revision=self.target.model_config.revision,
            load_config=self.target.load_config,
        )
        with on_device(self.runner.device):
            if self.takes_lm_head():
                self.model.set_embed_and_head(embed, head)
            else:
                self.model.set_embed(embed)
        hot = getattr(self.model, "hot_token_id", None)
        self.hot_token_id: Tensor | None = None if hot is None else hot.to(embed.device)

    def init_attention_backends(self) -> None:
        """It stays a speculative draft to SGLang: no decode step is run to tune kernels
        without hidden states (runner/flashinfer_autotune.py)."""
        with draft_tp_context(self.layout), draft_pp_context():
            self.worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        """SGLang itself would capture decode steps without hidden states."""
        with draft_tp_context(self.layout), draft_pp_context():
            self.worker.init_cuda_graphs(capture_decode_cuda_graph=False)
            self.graphs.capture()

    @contextmanager
    def on_ranks(self) -> Iterator[None]:
        """Around its forwards while it serves."""
        with draft_tp_context(self.layout), draft_pp_context():
            yield

    def follow(self, rows: Sequence[HeadRows], table: Tensor) -> list[HeadHint]:
        """Forward committed positions of some requests, one ragged pass; a hint each.

        table: req_to_token; the rows' columns hold slots.
        """
        features = torch.cat([r.features for r in rows]).to(self.runner.dtype)
        with self.on_ranks():
            output = self.extend(
                [t for r in rows for t in r.tokens],
                upload([r.row for r in rows], table.device),
                [r.start for r in rows],
                [len(r.tokens) for r in rows],
                table,
                HeadInput(features),
            )
        (tokens, chances), hidden = self._choose(output), output.hidden_states
        return [HeadHint(tokens[i], hidden[i], chances[i]) for i in range(len(rows))]

    def propose(self, requests: Sequence[ChainRequest], table: Tensor) -> list[Chain]:
        """Draft `num_new` tokens for each request, the likeliest at every step."""
        device = table.device
        rows = upload([r.row for r in requests], device)
        # The token chosen last stands one position further and is not forwarded.
        position_cpu = torch.tensor([r.position for r in requests])
        end_cpu = torch.tensor([r.position + max(0, r.num_new - 2) for r in requests])
        position, end = upload(position_cpu, device), upload(end_cpu, device)
        tokens = torch.stack([r.hint.token for r in requests])
        hidden = torch.stack([r.hint.hidden for r in requests])
        columns, opinions = [tokens], [torch.stack([r.hint.chance for r in requests])]
        with self.on_ranks():
            for _ in range(max(r.num_new for r in requests) - 1):
                self.graphs.load(hidden)
                output = self.decode(
                    tokens, rows, position, position_cpu, table, HeadInput(hidden)
                )
                (tokens, chances), hidden = self._choose(output), output.hidden_states
                columns.append(tokens)
                opinions.append(chances)
                # A request at the end of its chain repeats its last step in place.
                position = torch.minimum(position + 1, end)
                position_cpu = torch.minimum(position_cpu + 1, end_cpu)
        chosen = torch.stack(columns, dim=1).tolist()
        likely = torch.stack(opinions, dim=1).tolist()
        return [
            Chain(tuple(c[: r.num_new]), tuple(p[: r.num_new]))
            for c, p, r in zip(chosen, likely, requests, strict=True)
        ]

    def _choose(self, output: LogitsProcessorOutput) -> tuple[Tensor, Tensor]:
        """[bs] int64 and [bs] float32: the likeliest tokens, which agree most often,
        sampled or not, and their chances."""
        logits = output.next_token_logits.float()
        best, tokens = logits.max(dim=-1)
        chances = (best - logits.logsumexp(dim=-1)).exp()
        if self.hot_token_id is not None:
            tokens = self.hot_token_id[tokens]
        return tokens, chances
