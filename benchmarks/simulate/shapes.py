"""What a `config.json` says of a model's costs: bytes, operations, layers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with grouped-query attention, dense or with experts.

    Weights and KV are taken to be 16-bit.
    """

    name: str
    num_layers: int
    hidden: int
    #: Query heads times their width, and KV heads times their width.
    query_dim: int
    kv_dim: int
    #: Parameters that every token reads.
    dense_params: float
    #: Parameters of all experts together, 0 for a dense model.
    expert_params: float
    num_experts: int
    experts_per_token: int
    #: Parameters of the LM head, which are among `dense_params`.
    lm_head_params: float = 0.0

    @classmethod
    def read(cls, path: Path) -> ModelShape:
        """Of a `config.json`, or of a folder that holds one.

        Raises ValueError naming the file and the key that it lacks.
        """
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{str(path)!r} is not a readable config.json: {error}."
            ) from error
        try:
            return cls.of(config, name=config.get("_name", path.stem))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{str(file)!r} lacks {error}; expected the config.json of a decoder "
                "such as Qwen3 or Llama."
            ) from error

    @classmethod
    def of(cls, config: dict[str, Any], name: str) -> ModelShape:
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        query_dim = heads * head_dim
        kv_dim = (config.get("num_key_value_heads") or heads) * head_dim
        embedding = config["vocab_size"] * hidden
        attention = layers * (2 * hidden * query_dim + 2 * hidden * kv_dim)
        num_experts = config.get("num_experts") or config.get("num_local_experts") or 0
        mlp_width = config["intermediate_size"]
        if num_experts:
            mlp_width = config.get("moe_intermediate_size") or mlp_width
        mlp = 3.0 * layers * hidden * mlp_width
        return cls(
            name=name,
            num_layers=layers,
            hidden=hidden,
            query_dim=query_dim,
            kv_dim=kv_dim,
            # A step reads the LM head whole, and of the embedding a row a token.
            dense_params=attention + embedding + (0.0 if num_experts else mlp),
            expert_params=mlp * num_experts,
            num_experts=num_experts,
            experts_per_token=config.get("num_experts_per_tok") or 0,
            lm_head_params=embedding,
        )

    @property
    def mtp_head(self) -> ModelShape:
        """One layer more and the LM head: what many models ship to draft."""
        layers = self.dense_params - self.lm_head_params
        return replace(
            self,
            name=f"{self.name} MTP head",
            num_layers=1,
            dense_params=layers / self.num_layers + self.lm_head_params,
            expert_params=self.expert_params / self.num_layers,
        )

    def weight_bytes(self, num_tokens: float) -> float:
        """Bytes of weights that a forward over so many tokens reads."""
        touched = 0.0
        if self.num_experts:
            idle = 1 - self.experts_per_token / self.num_experts
            touched = 1 - idle**num_tokens
        return 2 * (self.dense_params + touched * self.expert_params)

    @property
    def flops_per_token(self) -> float:
        """Multiplications and additions of a token, attention left out."""
        active = self.dense_params
        if self.num_experts:
            share = self.experts_per_token / self.num_experts
            active += share * self.expert_params
        return 2 * active

    @property
    def kv_bytes(self) -> float:
        """KV bytes of a token."""
        return 2 * 2 * self.num_layers * self.kv_dim
