"""Depth growth that keeps the function: new blocks whose outputs are zero at first."""

import torch

from benchmarks.train_pair.model import ModelConfig, TinyLlama


def grow(model: TinyLlama, layers: int, *, on_top: bool) -> TinyLlama:
    """A model of `layers` layers with the same outputs.

    on_top: new blocks, freshly initialised, above the old ones (room to judge what the
    old ones predict); otherwise copies of each block follow it (layers: a multiple).
    """
    old = model.cfg
    cfg = ModelConfig(old.vocab, layers, old.hidden, old.heads, old.ffn)
    grown = TinyLlama(cfg, model.block_fn)
    if on_top:
        source = torch.arange(old.layers)
        kept = torch.arange(old.layers)
    elif layers % old.layers:
        raise ValueError(f"layers {layers}, expected a multiple of {old.layers}")
    else:
        source = torch.arange(old.layers).repeat_interleave(layers // old.layers)
        kept = torch.arange(0, layers, layers // old.layers)
    fresh = torch.ones(layers, dtype=torch.bool)
    fresh[kept] = False
    with torch.no_grad():
        for name, param in grown.named_parameters():
            if name in TinyLlama.STACKED:
                param[: len(source)] = getattr(model, name)[source]
            else:
                param.copy_(getattr(model, name))
        grown.wo[fresh] = 0
        grown.wd[fresh] = 0
    return grown
