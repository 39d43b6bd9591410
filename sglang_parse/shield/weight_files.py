"""Whether the weights of a folder fit the served model, from their files' headers.

SGLang 0.5.23 sets the model's path to the new folder before it loads. Where that fails
it means to load the old weights, reads the new folder again, and its scheduler ends.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# A file may leave it out where it is the embedding.
TIED = frozenset({"lm_head.weight"})
Shapes = Mapping[str, tuple[int, ...]]


def problem_of_weights(asked: str, served: str) -> str:
    """Why the weights of `asked` cannot take the place of those of `served`, "" where
    they can or where that cannot be told.

    asked, served: model folders, or names whose files are in the cache of the hub.
    Other names for tensors are no fault: a model reads several. SGLang loads a part of
    the tensors without a word.
    """
    own, files = served_shapes(served), weight_files(asked)
    if not own:
        return ""
    found: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            found.update(shapes_of(path))
        except Exception as e:  # safetensors has an error of its own
            return f"{path.name} cannot be read ({str(e)[:120]})"
    if told := other_shape(found.items(), own):
        return told
    missing = sorted(own.keys() - found.keys() - TIED)
    if missing and found and found.keys() <= own.keys():
        return f"{len(missing)} tensors are missing, {missing[0]} among them"
    return ""  # where it has no files, SGLang says so


def problem_of_tensors(named_tensors: Any, served: str) -> str:
    """The same of tensors in memory. They may be any part of a model.

    named_tensors: pairs of name and tensor, or a bucket of SGLang with `metadata`.
    """
    if isinstance(named_tensors, dict):
        pairs = [(one.name, one.shape) for one in named_tensors["metadata"]]
    else:  # what another process shards has no shape yet
        pairs = [(k, t.shape) for k, t in named_tensors if hasattr(t, "shape")]
    return other_shape(((k, tuple(v)) for k, v in pairs), served_shapes(served))


def other_shape(found: Iterable[tuple[str, tuple[int, ...]]], own: Shapes) -> str:
    for name, shape in found:
        if shape != own.get(name, shape):
            return f"{name} has the shape {shape}, and the served one {own[name]}"
    return ""


@functools.lru_cache(maxsize=4)  # weights come in many parts
def served_shapes(model_path: str) -> Shapes:
    """Tensors of a model by name, none where it has no such files that can be read."""
    own: dict[str, tuple[int, ...]] = {}
    try:
        for path in weight_files(model_path):
            own.update(shapes_of(path))
    except Exception:  # safetensors has an error of its own
        return {}
    return own


def weight_files(model_path: str) -> list[Path]:
    """Its safetensors files, none where it has no such files on this machine."""
    from huggingface_hub import snapshot_download

    folder = Path(model_path)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(model_path, local_files_only=True))
        except Exception:  # it is no name, or was never fetched
            return []
    return sorted(folder.glob("*.safetensors"))


def shapes_of(path: Path) -> Shapes:
    """Tensors of a file by name. Reads its header alone."""
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return {k: tuple(file.get_slice(k).get_shape()) for k in list(file.keys())}
