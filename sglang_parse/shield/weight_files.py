"""Whether the weights of a folder fit the served model, from their files' headers.

SGLang 0.5.23 sets the model's path to the new folder before it loads. Where that fails
it means to load the old weights, reads the new folder again, and its scheduler ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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
    theirs, files = weight_files(served), weight_files(asked)
    if not theirs:
        return ""
    own: dict[str, tuple[int, ...]] = {}
    for path in theirs:
        own.update(shapes_of(path))
    found: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            found.update(shapes_of(path))
        except Exception as e:  # safetensors has an error of its own
            return f"{path.name} cannot be read ({str(e)[:120]})"
    for name, shape in found.items():
        if shape != own.get(name, shape):
            return f"{name} has the shape {shape}, and the served one {own[name]}"
    missing = sorted(own.keys() - found.keys() - TIED)
    if missing and found and found.keys() <= own.keys():
        return f"{len(missing)} tensors are missing, {missing[0]} among them"
    return ""  # where it has no files, SGLang says so


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
