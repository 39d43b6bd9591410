"""Whether a model's own checkpoint has a head for multi-token prediction (MTP)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_parse.options.table import MTP, flag_name
from sglang_parse.sgl.families import SEE, family_of
from sglang_parse.sgl.model_folder import local_folder, weight_names

#: By the option that asks for a head: the fields that name the model and its revision.
MODELS = {
    "compose": ("model_path", "revision"),
    "draft_compose": (
        "speculative_draft_model_path",
        "speculative_draft_model_revision",
    ),
}


def check_mtp(server_args: Any, option: str = "compose") -> tuple[str, str | None]:
    """Path and revision of a checkpoint with a head that PARSE knows, the target's or
    the draft's. option: one of `MODELS`. Raises ValueError.

    A checkpoint that is not on this machine passes, and so does one whose weights
    SGLang makes up (--load-format dummy).
    """
    from sglang.srt.utils.hf_transformers_utils import get_config

    path, revision = (getattr(server_args, field) for field in MODELS[option])
    trust = server_args.trust_remote_code
    config = get_config(path, trust_remote_code=trust, revision=revision)
    name = (getattr(config, "architectures", None) or ["the model"])[0]
    flag = f"{flag_name(option)} is {MTP!r}"
    beginning = family_of(name).mtp
    if not beginning:
        raise ValueError(
            f"{flag}, and PARSE knows no such head of {name}; leave it out ({SEE})."
        )
    folder = local_folder(path, revision, server_args.download_dir)
    weights = folder if server_args.load_format != "dummy" else None
    if told := _missing(weights, config.get_text_config(), beginning):
        raise ValueError(
            f"{flag}, and --{MODELS[option][0].replace('_', '-')} {path!r} {told}; "
            "leave it out, or take a checkpoint with its head for multi-token "
            "prediction."
        )
    return path, revision


def _missing(folder: Path | None, config: Any, beginning: str) -> str:
    """What the checkpoint lacks, or "". folder: with its weights, if there are any.
    beginning: of the names of the head's."""
    if not getattr(config, "num_nextn_predict_layers", 0):
        return "says of no num_nextn_predict_layers in its config.json"
    names = weight_names(folder) if folder is not None else None
    beginning = beginning.format(layers=config.num_hidden_layers)
    if names is None or any(one.startswith(beginning) for one in names):
        return ""
    return f"holds no weights {beginning}*"
