"""Where the real model's folders lie; builds those that are missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.real_model.cache import build_folder, cache_folder, check_room, locked
from benchmarks.real_model.wheel import gguf_file

# The number counts recipes: a change of what is written needs the next one.
NAME = "smollm2-135m-instruct-1"
MODEL_BYTES = 280 << 20
# Bits of a weight in the draft; the target's own have 4 bits and an offset.
DRAFT_BITS = 5
# The head that docs/results/real-model.md tells of.
SHIPPED_HEAD = Path(__file__).parent / "smollm2_head"
Advance = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RealModels:
    """Model folders as SGLang reads them."""

    #: SmolLM2-135M-Instruct.
    target: Path
    #: The same model with coarser weights: it disagrees at times, and saves no time.
    draft: Path
    #: An EAGLE-3 head: what benchmarks/train_real has written, else the shipped one.
    head: Path


def built_models() -> RealModels | None:
    """The folders in the cache, None where target or draft was not built yet."""
    folder = cache_folder() / NAME
    target, draft, head = (folder / name for name in ("target", "draft", "head"))
    if not (target.is_dir() and draft.is_dir()):
        return None
    return RealModels(target, draft, head if head.is_dir() else SHIPPED_HEAD)


def real_models(
    say: Callable[[str], None] = lambda _: None,
    advance: Advance = lambda *_: None,
) -> RealModels:
    """The folders, built where they are missing; processes wait for each other.

    say: told what takes long. advance: model, tensors done, tensors in all. Raises
    ModelError if the wheel, the disk or the cache does not allow it.
    """
    folder = cache_folder() / NAME
    with locked(folder):
        missing = [n for n in ("target", "draft") if not (folder / n).is_dir()]
        if missing:
            _build(folder, missing, say, advance)
    models = built_models()
    assert models is not None
    return models


def _build(
    folder: Path, names: list[str], say: Callable[[str], None], advance: Advance
) -> None:
    from benchmarks.real_model.convert import write_model

    check_room(folder, MODEL_BYTES * len(names))
    with gguf_file(say) as path:
        for name in names:
            write = partial(
                write_model,
                source=path,
                bits=DRAFT_BITS if name == "draft" else None,
                advance=partial(advance, name),
            )
            build_folder(folder / name, write)
