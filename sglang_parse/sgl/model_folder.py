"""What is wrong with a model's folder, found without loading a weight.

SGLang and Hugging Face notice the same things late, and name neither the flag nor the
file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
TOKENIZERS = ("token*", "vocab.*", "*.model")
INDEX = "model.safetensors.index.json"
# A name of the Hugging Face hub: `gpt2` or `owner/name`.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def problem_of(
    path: str, *, needs_weights: bool = True, needs_tokenizer: bool = False
) -> str:
    """What is wrong with the model at `path`, as the end of "PATH ...", or "".

    A name of a hub, an address and a GGUF file pass. needs_weights: false where SGLang
    makes them up (--load-format dummy).
    """
    if not path.strip():
        return "is empty; expected a model folder or a Hugging Face name."
    place = Path(path)
    if place.is_dir():
        return _folder_problem(place, needs_weights, needs_tokenizer)
    if place.suffix == ".gguf" and place.is_file():
        return ""
    if place.exists():
        return "is a file; expected a model folder."
    if "://" in path or _HUB_NAME.fullmatch(path):
        return ""
    return "is not a folder; expected a model folder or a Hugging Face name."


def architectures_of(path: str, revision: str | None) -> list[str]:
    """SGLang's names of a model, from its config.json; none if that is not there."""
    from transformers import PretrainedConfig

    try:
        model, _ = PretrainedConfig.get_config_dict(path, revision=revision)
    except (OSError, ValueError):
        return []  # SGLang says it in its own words
    return list(model.get("architectures") or ())


def local_folder(
    path: str, revision: str | None = None, cache_dir: str | None = None
) -> Path | None:
    """Where a model lies: a folder, or what was fetched of a Hugging Face name; None if
    it is not on this machine."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                path, revision=revision, cache_dir=cache_dir, local_files_only=True
            )
        )
    except Exception:  # whatever the hub's client raises offline
        return None


def _config_of(path: str) -> dict[str, Any]:
    """The config.json of a local model, empty where it cannot be read."""
    try:
        found = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def quantization_of(path: str) -> str:
    """How the weights of a local model are quantised by its config.json, or ""."""
    found = _config_of(path).get("quantization_config")
    if not isinstance(found, dict):
        return ""
    return str(found.get("quant_method") or "an unnamed method")


def context_length(path: str) -> int | None:
    """Positions of the model in a folder, as SGLang counts them; None where its
    config.json does not say so plainly, or there is no folder."""
    config = _config_of(path)
    config = config.get("text_config") or config
    if config.get("rope_scaling"):
        return None
    found = config.get("max_position_embeddings")
    return found if isinstance(found, int) else None


def weight_names(folder: Path) -> set[str] | None:
    """Names of the weights in a folder; None where it has no safetensors."""
    index = folder / INDEX
    if index.exists():
        found = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
        return set(found)
    names: set[str] | None = None
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            names = (names or set()) | set(weights.keys())
    return names


def _folder_problem(folder: Path, needs_weights: bool, needs_tokenizer: bool) -> str:
    missing = [
        what
        for what, patterns, needed in (
            ("config.json", ("config.json", "params.json"), True),
            ("weights (*.safetensors or *.bin)", WEIGHTS, needs_weights),
            ("a tokenizer", TOKENIZERS, needs_tokenizer),
        )
        if needed and not _holds(folder, patterns)
    ]
    if missing:
        return f"lacks {', '.join(missing)}; complete it."
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", INDEX):
        if told := _json_problem(folder / name):
            return told
    return _weights_problem(folder) if needs_weights else ""


def _holds(folder: Path, patterns: tuple[str, ...]) -> bool:
    """Whether a file that matches is there and not empty."""
    return any(p.stat().st_size for pattern in patterns for p in folder.glob(pattern))


def _json_problem(file: Path) -> str:
    """A JSON file that is there and is not an object."""
    if not file.exists():
        return ""
    try:
        value: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        return f"has a broken {file.name} ({e}); restore the file."
    if not isinstance(value, dict):
        return f"has a {file.name} that is no JSON object; restore the file."
    return ""


def _weights_problem(folder: Path) -> str:
    index = folder / INDEX
    files = sorted(folder.glob("*.safetensors"))
    if index.exists():
        shards = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
        files = [folder / name for name in sorted(set(shards.values()))]
    for file in files:
        if not file.exists():
            return f"lacks {file.name}, which {INDEX} names; complete it."
        if told := _file_problem(file):
            return told
    return ""


def _file_problem(file: Path) -> str:
    """A safetensors file whose header cannot be read, or that has another length."""
    try:
        with safe_open(file, "pt"):
            return ""
    except (OSError, SafetensorError) as e:
        return f"has a broken {file.name} ({e}); download it again."
