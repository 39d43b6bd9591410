"""SGLang's backend of gated delta nets on CPU, whose verify pass leaves states alone.

A prefill or a decode step goes on from a request's state and replaces it. A verify pass
reads it: the draft chain goes on from it, and every judge suffix from the chain's state
at its boundary. Nothing is written, as nobody knows yet which tokens are kept. The
pass keeps what the chain's rows brought into each layer, and `Advance` computes the
kept ones again (docs/decisions/0012-recurrent-targets.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config
from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    HybridLinearAttnBackend,
    MambaAttnBackendBase,
)
from torch import Tensor

from sglang_parse.recurrent.gated_delta import (
    LinearInputs,
    LinearState,
    Places,
    run_layer,
)
from sglang_parse.verify.backends.verify_backend import ParseVerifyInput
from sglang_parse.verify.layout import VerifyPlan, build_virtual_sequences


def add_linear_layers(original: Callable[..., Any], runner: Any, full: Any) -> Any:
    """AROUND hook on attn_backend_wrapper: models with gated delta nets get the torch
    backend for their linear layers. full: the backend of the other layers, and of the
    target's MTP head, which has no linear layer."""
    config = hybrid_gdn_config(runner.model_config)
    if runner.is_draft_worker and config is not None:
        return full
    if config is None:
        return original(runner, full)
    return HybridLinearAttnBackend(
        full, GatedDeltaBackend(runner), config.full_attention_layer_ids
    )


@dataclass(frozen=True)
class StateSlots:
    """The states of some requests in SGLang's pool (mem_cache/memory_pool.py).

    index: [n] int64.
    """

    pool: Any
    index: Tensor

    def read(self, layer_id: int) -> LinearState:
        cache = self.pool.mamba2_layer_cache(layer_id)
        return LinearState(cache.conv[0][self.index], cache.temporal[self.index])

    def write(self, layer_id: int, state: LinearState) -> None:
        cache = self.pool.mamba2_layer_cache(layer_id)
        cache.conv[0][self.index] = state.conv.to(cache.conv[0].dtype)
        cache.temporal[self.index] = state.delta.to(cache.temporal.dtype)


@dataclass
class Advance:
    """Brings the states of a pass's requests to the tokens that are kept of it.

    Call it once. It holds what the draft chains brought into each layer.
    """

    slots: StateSlots
    layers: list[tuple[Any, LinearInputs]] = field(default_factory=list)

    def __call__(self, num_kept: Sequence[int]) -> None:
        """num_kept: leading rows of each chain that are kept, the bonus token's first;
        0 leaves a request as it was."""
        layers, self.layers = self.layers, []
        kept = [(i, n) for i, n in enumerate(num_kept) if n]
        if not kept:
            return
        index = torch.tensor([i for i, _ in kept])
        slots = StateSlots(self.slots.pool, self.slots.index[index])
        places = [(at, n) for at, (_, n) in enumerate(kept)]
        for layer, inputs in layers:
            start = slots.read(layer.layer_id)
            _, ends = run_layer(layer, inputs.leading(num_kept), start, places)
            slots.write(layer.layer_id, ends)


@dataclass(frozen=True)
class ChainsAndSuffixes:
    """Which rows of a pass are draft chains and which are judge suffixes.

    chain_rows, suffix_rows: [n] int64. branches: for each suffix its chain, and the
    rows of that in front of it.
    """

    chain_rows: Tensor
    chain_lens: tuple[int, ...]
    suffix_rows: Tensor
    suffix_lens: tuple[int, ...]
    branches: Places

    @classmethod
    def of(cls, plan: VerifyPlan) -> ChainsAndSuffixes:
        sequences = build_virtual_sequences(plan)
        lens, starts = sequences.qo_lens, [0, *accumulate(sequences.qo_lens)]
        chains, suffixes, branches = [], [], []
        pairs = zip(sequences.request, sequences.prefix_lens, strict=True)
        for i, (request, prefix_len) in enumerate(pairs):
            in_front = prefix_len - plan.seq_lens[request]
            if in_front == 0:  # a suffix has the bonus token in front at least
                chains.append(i)
            else:
                suffixes.append(i)
                branches.append((request, in_front))
        rows = [
            torch.tensor([r for i in part for r in range(starts[i], starts[i + 1])])
            for part in (chains, suffixes)
        ]
        return cls(
            chain_rows=rows[0].long(),
            chain_lens=tuple(lens[i] for i in chains),
            suffix_rows=rows[1].long(),
            suffix_lens=tuple(lens[i] for i in suffixes),
            branches=branches,
        )


class GatedDeltaBackend(MambaAttnBackendBase):
    """Linear layers of Qwen3-Next and its successors, in plain torch."""

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.slots: StateSlots | None = None
        self.lens: tuple[int, ...] = ()
        #: Of a verify pass, None in other forwards.
        self.parts: ChainsAndSuffixes | None = None
        self.advance: Advance | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        rows, spec_info = forward_batch.req_pool_indices, forward_batch.spec_info
        self.parts = self.advance = None
        if isinstance(spec_info, ParseVerifyInput):
            self.parts = ChainsAndSuffixes.of(spec_info.plan)
            rows = spec_info.request_rows(rows)
        elif forward_batch.forward_mode.is_decode():
            self.lens = (1,) * len(rows)
        else:
            self.lens = tuple(forward_batch.extend_seq_lens_cpu)
        pool = self.req_to_token_pool
        self.slots = StateSlots(pool, pool.get_mamba_indices(rows).long())
        if isinstance(spec_info, ParseVerifyInput):
            self.advance = spec_info.advance = Advance(self.slots)

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.forward_extend(*args, **kwargs)

    def forward_extend(
        self, layer: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, **_: Any
    ) -> Tensor:
        """[1, tokens, heads, value width], as SGLang's own backend gives it."""
        if self.parts is not None:
            return self._verify(self.parts, layer, mixed_qkv, a, b)[None]
        assert self.slots is not None
        inputs = LinearInputs.of(None, self.lens, mixed_qkv, a, b)
        start = self.slots.read(layer.layer_id)
        out, ends = run_layer(layer, inputs, start, list(enumerate(self.lens)))
        self.slots.write(layer.layer_id, ends)
        return out[None]

    def _verify(
        self, parts: ChainsAndSuffixes, layer: Any, qkv: Tensor, a: Tensor, b: Tensor
    ) -> Tensor:
        """Chains from the requests' states, suffixes from those of the chains."""
        assert self.slots is not None and self.advance is not None
        chains = LinearInputs.of(parts.chain_rows, parts.chain_lens, qkv, a, b)
        self.advance.layers.append((layer, chains))
        start = self.slots.read(layer.layer_id)
        found, branches = run_layer(layer, chains, start, parts.branches)
        if not parts.suffix_lens:
            return found
        out = found.new_empty(len(qkv), *found.shape[1:])
        out[parts.chain_rows] = found
        suffixes = LinearInputs.of(parts.suffix_rows, parts.suffix_lens, qkv, a, b)
        out[parts.suffix_rows], _ = run_layer(layer, suffixes, branches, ())
        return out
