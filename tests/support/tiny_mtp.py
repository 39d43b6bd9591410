"""Tiny targets whose checkpoints have a head for multi-token prediction.

The head is one more decoder layer behind those of the target. Weights are random, but
its projection passes the embedding on, so that it agrees often and not always.
`MtpReference` is that head in plain torch, without caches, from Hugging Face's layers.
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.tiny_models import FAMILIES

NOISE = 0.2
SEED = 7
NAMES = ("deepseek_v3", "glm4_moe")
# The head's weights in a checkpoint, beside those of its layer.
WEIGHTS = {"embedding": "enorm", "hidden": "hnorm", "norm": "shared_head.norm"}


@dataclass
class MtpReference:
    """A target and its head."""

    target: Any
    layer: Any
    embedding: Any
    hidden: Any
    project: Tensor
    norm: Any

    def final_states(self, ids: list[int]) -> Tensor:
        """[len(ids), hidden] of the target behind its last norm."""
        with torch.no_grad():
            return self.target.model(torch.tensor([ids])).last_hidden_state[0]

    def forward(self, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """The head over pairs of a token and the state in front of it, from position 0
        on: what is likeliest behind each, [len(tokens)], and its states there."""
        model, num = self.target.model, len(tokens)
        with torch.no_grad():
            embedded = self.embedding(model.embed_tokens(torch.tensor([tokens])))
            pairs = torch.cat([embedded, self.hidden(states[None])], dim=-1)
            x, positions = pairs @ self.project.T, torch.arange(num)[None]
            mask = torch.full((num, num), -torch.inf).triu(1)[None, None]
            x = self.layer(
                x,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=model.rotary_emb(x, positions),
            )
            x = x[0] if isinstance(x, tuple) else x
            found = self.norm(x)[0]
            return self.target.lm_head(found).argmax(-1), found

    def passes(self, prompt: list[int], answer: list[int], num: int) -> int:
        """Passes of the target for a greedy answer, drafted `num` tokens at a time."""
        ids, end = [*prompt, *answer], len(prompt) + len(answer)
        states = self.final_states(ids)[:-1]
        firsts = self.forward(ids[1:], states)  # a row sees none behind it
        at, passes = len(prompt) + 1, 0  # the prefill writes the first token
        while at < end:
            # The target has not read the last of ids[:at].
            tokens, seen = ids[1:at], states[: at - 1]
            likely, state = (t[at - 2] for t in firsts)
            right = 0
            while right < num and at + right < end:
                token = int(likely)
                if token != ids[at + right]:
                    break
                right += 1
                tokens, seen = [*tokens, token], torch.cat([seen, state[None]])
                if right < num:
                    likely, state = (t[-1] for t in self.forward(tokens, seen))
            at, passes = at + right + 1, passes + 1
        return passes


def build_with_mtp(name: str, folder: Path) -> MtpReference:
    """Write the family's target and its head to `folder`."""
    family = FAMILIES[name]
    layers = family.fields["num_hidden_layers"]
    fields = {**family.fields, "num_hidden_layers": layers + 1}
    more = {**family.more, "num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    family = replace(family, fields=fields, more=more)
    family.build(folder)
    whole = family.model_of()
    reference = _reference(whole, layers)
    prefix = f"model.layers.{layers}."
    parts = {f"{prefix}eh_proj.weight": reference.project} | {
        f"{prefix}{name}.weight": getattr(reference, part).weight.data
        for part, name in WEIGHTS.items()
    }
    (file,) = folder.glob("*.safetensors")
    save_file({**load_file(file), **parts}, file, metadata={"format": "pt"})
    return reference


def _reference(whole: Any, layers: int) -> MtpReference:
    """whole: a model whose last layer is the head's; it becomes the target."""
    generator = torch.Generator().manual_seed(SEED)
    size = whole.config.hidden_size

    def norm() -> Any:
        found = copy.deepcopy(whole.model.norm)
        noise = 0.1 * torch.randn(size, generator=generator)
        found.weight.data.add_(noise)
        return found

    noise = NOISE * torch.randn(size, 2 * size, generator=generator) / size**0.5
    project = noise + torch.eye(size, 2 * size)
    layer = whole.model.layers[layers]
    whole.model.layers = whole.model.layers[:layers]
    whole.config.num_hidden_layers = layers
    whole.set_attn_implementation("eager")
    return MtpReference(
        target=whole,
        layer=layer,
        embedding=norm(),
        hidden=norm(),
        project=project,
        norm=norm(),
    )
