"""DFLASH and DSpark drafts as heads of the target: one forward writes many tokens.

The block is the bonus token and mask tokens. All of them see each other, and the
target's hidden states of the tokens before them: its layers take these as KV, which
lies at the slots of their positions like any head's.

Source: sglang/srt/models/dflash.py, dspark.py; speculative/dflash_worker_v2.py, whose
worker writes that KV in `_append_target_hidden_sequential`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from sglang.srt.configs.draft_parallel import DraftTPExecution
from sglang.srt.layers.logits_processor import LogitsMetadata
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.models.dspark import (
    DSparkDraftModel,
    LingDSparkModel,
    Qwen3DSparkModel,
)
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from torch import Tensor

from sglang_parse.drafting.drafter import DrafterContext
from sglang_parse.drafting.head_model import (
    Chain,
    ChainRequest,
    HeadHint,
    HeadModel,
    HeadRows,
)
from sglang_parse.options.table import DFLASH, DSPARK, flag_name
from sglang_parse.sgl.compat.model_changes import show_layers
from sglang_parse.sgl.upload import upload
from sglang_parse.verify.lm_head import lm_head_of

# SGLang writes it into the target's embedding, which other requests may read.
MASK_EMBEDDING = "mask_embedding.pt"


class BlockHead(HeadModel):
    """The draft of `--speculative-parse-eagle-model-path` under `dflash`."""

    name = DFLASH
    kinds: tuple[type, ...] = (DFlashDraftModel,)
    #: Whether the row of the bonus token predicts too, and not those of masks alone.
    from_bonus = False
    execution = DraftTPExecution.SINGLE_GROUP

    def __init__(self, context: DrafterContext) -> None:
        """Also has the target show its hidden states. Raises ValueError on a draft
        that does more than fill its masks, or lacks what that takes."""
        flag, target = flag_name("eagle_model_path"), context.target
        path = context.config.eagle_model_path
        super().__init__(context, path=path, revision=None, flag=flag)
        size = target.model_config.vocab_size
        config = parse_dflash_draft_config(
            draft_hf_config=self.runner.model_config.hf_config
        )
        mask, layers = config.mask_token_id, config.target_layer_ids
        last = target.model_config.num_hidden_layers - 2  # one in front of a layer
        for holds, what in (
            (type(self.model) not in self.kinds, "has a draft of another kind"),
            ((Path(path) / MASK_EMBEDDING).exists(), f"has a {MASK_EMBEDDING}"),
            (config.is_domino, "corrects its tokens one after the other"),
            (mask is None or mask >= size, f"has mask_token_id {mask}"),
            (
                not layers or layers != sorted({*layers}) or layers[-1] > last,
                f"reads layers {layers}",
            ),
        ):
            if holds:
                raise ValueError(
                    f"{flag} is {path!r}, which {what}; expected a {self.name} draft "
                    f"with a mask_token_id below {size} and rising target_layer_ids, "
                    f"{last} at most."
                )
        self.mask_id = int(mask)
        self.most_tokens = self.most_of_block()
        show_layers(target, flag, layers=[layer + 1 for layer in layers])
        self.set_width(len(layers) * target.model_config.hidden_size)
        why = "SGLang captures no forward of this shape"
        self.graphs.missing = dict.fromkeys(self.graphs.missing, why)
        self.lm_head = lm_head_of(target.model)
        scale = getattr(target.model, "get_dflash_noise_embedding_scale", lambda: 1.0)
        self._scale = float(scale())
        self.model.forward_embed = lambda ids: self._embedded

    def most_of_block(self) -> int:
        """Tokens of a block as the draft was trained."""
        return int(self.model.block_size) - 1

    def _share_embedding(self) -> None:
        """The target's embedding is read before each block."""
        self._embed = self.target.model.get_input_embeddings()

    def init_cuda_graphs(self) -> None:
        """A block is forwarded without graphs."""
        with draft_tp_context(self.layout), draft_pp_context():
            self.worker.init_cuda_graphs(capture_decode_cuda_graph=False)

    @torch.no_grad()
    def follow(self, rows: Sequence[HeadRows], table: Tensor) -> list[HeadHint]:
        """Write the KV of the target's hidden states of some requests; a hint each,
        which is the request's bonus token."""
        device, lens = table.device, [len(r.tokens) for r in rows]
        places = [(r.row, r.start + j) for r in rows for j in range(len(r.tokens))]
        row, position = upload(places, device).unbind(1)
        features = torch.cat([r.features for r in rows]).to(self.runner.dtype)
        with draft_tp_context(self.layout), draft_pp_context():
            states = self.model.project_target_hidden(features)
            self._write(states, position, table[row, position].to(torch.int64))
        ends = torch.tensor(lens).cumsum(0).tolist()
        bonus = upload([r.tokens[-1] for r in rows], device)
        sure = torch.ones(len(rows), device=device)
        return [
            HeadHint(bonus[i], states[end - 1], sure[i]) for i, end in enumerate(ends)
        ]

    def _write(self, states: Tensor, position: Tensor, slots: Tensor) -> None:
        for layer in self.model.layers:
            attention, read = layer.self_attn, self.model.prepare_context_hidden_for_kv
            key, value = attention.kv_proj_only(read(layer, states))
            key = attention.apply_k_rope(position, attention.apply_k_norm(key))
            shape = (-1, attention.num_kv_heads, attention.head_dim)
            self.runner.token_to_kv_pool.set_kv_buffer(
                attention.attn,
                KVWriteLoc(slots, physical=True),
                key.view(shape),
                value.view(shape),
                attention.attn.k_scale,
                attention.attn.v_scale,
            )

    @torch.no_grad()
    def propose(self, requests: Sequence[ChainRequest], table: Tensor) -> list[Chain]:
        """Draft `num_new` tokens for each request, the likeliest at every row."""
        device, most = table.device, max(r.num_new for r in requests)
        lens = [r.num_new + 1 - self.from_bonus for r in requests]
        first = [sum(lens[:i]) for i in range(len(lens))]
        # Rows [bs, most]; behind the end of a shorter block its last row again.
        rows = [
            [start + min(j + 1 - self.from_bonus, num - 1) for j in range(most)]
            for start, num in zip(first, lens, strict=True)
        ]
        bonus = torch.stack([r.hint.token for r in requests])
        ids = torch.full((sum(lens),), self.mask_id, device=device)
        ids[upload(first, device)] = bonus
        self._embedded = self._embed(ids) * self._scale
        with draft_tp_context(self.layout), draft_pp_context():
            output = self.extend(
                [self.mask_id] * len(ids),  # the model reads what is embedded
                upload([r.row for r in requests], device),
                [r.position for r in requests],
                lens,
                table,
            )
        states = output.hidden_states[upload(rows, device)]
        # The LM head is the target's, on all of its ranks.
        logits = self.lm_head.processor(
            None,
            states.flatten(0, 1),
            self.lm_head.weights,
            LogitsMetadata(forward_mode=ForwardMode.DECODE),
        ).next_token_logits.float()
        tokens, chances = self._read(logits.unflatten(0, (-1, most)), states, bonus)
        return [
            Chain(tuple(c[: r.num_new]), tuple(p[: r.num_new]))
            for c, p, r in zip(tokens.tolist(), chances.tolist(), requests, strict=True)
        ]

    def _read(
        self, logits: Tensor, states: Tensor, bonus: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[bs, most] the likeliest tokens and their chances. logits: [bs, most, vocab];
        states: [bs, most, hidden], the draft's own; bonus: [bs]."""
        best, tokens = logits.max(dim=-1)
        return tokens, (best - logits.logsumexp(dim=-1)).exp()


class MarkovBlockHead(BlockHead):
    """A DSpark draft: a small head adds to the logits of each row what the token before
    it makes likely, so that the tokens of a block are chosen one after the other."""

    name = DSPARK
    kinds = (DSparkDraftModel, LingDSparkModel, Qwen3DSparkModel)

    @property
    def from_bonus(self) -> bool:  # type: ignore[override]
        """As the checkpoint was trained."""
        return bool(self.model.sample_from_anchor)

    def most_of_block(self) -> int:
        return int(self.model.gamma)

    def _read(
        self, logits: Tensor, states: Tensor, bonus: Tensor
    ) -> tuple[Tensor, Tensor]:
        head, before, columns = self.model.markov_head, bonus, []
        memory = head.init_state(states)
        for j in range(logits.shape[1]):
            bias, memory = head.step_bias(
                before, hidden_states=states[:, j], state=memory
            )
            found = super()._read(logits[:, j] + bias, states, bonus)
            columns.append(found)
            before = found[0]
        tokens, chances = zip(*columns, strict=True)
        return torch.stack(tokens, dim=1), torch.stack(chances, dim=1)
