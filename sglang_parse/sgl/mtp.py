"""Whether a target's own checkpoint has a head for multi-token prediction (MTP)."""

from __future__ import annotations

from typing import Any

from sglang_parse.options.table import MTP, flag_name
from sglang_parse.sgl.families import SEE, family_of
from sglang_parse.sgl.model_folder import local_folder, weight_names


def check_mtp(server_args: Any) -> None:
    """The target's checkpoint has a head that PARSE knows. Raises ValueError.

    A checkpoint that is not on this machine passes, and so does one whose weights
    SGLang makes up (--load-format dummy).
    """
    from sglang.srt.utils.hf_transformers_utils import get_config

    path = server_args.model_path
    trust = server_args.trust_remote_code
    config = get_config(path, trust_remote_code=trust, revision=server_args.revision)
    name = (getattr(config, "architectures", None) or ["the model"])[0]
    flag = f"{flag_name('compose')} is {MTP!r}"
    beginning = family_of(name).mtp
    if not beginning:
        raise ValueError(
            f"{flag}, and PARSE knows no such head of {name}; leave it out ({SEE})."
        )
    if told := _missing(server_args, config.get_text_config(), beginning):
        raise ValueError(
            f"{flag}, and --model-path {path!r} {told}; leave it out, or take a "
            "checkpoint with its head for multi-token prediction."
        )


def _missing(server_args: Any, config: Any, beginning: str) -> str:
    """What the checkpoint lacks, or "". beginning: of the names of its weights."""
    if not getattr(config, "num_nextn_predict_layers", 0):
        return "says of no num_nextn_predict_layers in its config.json"
    if server_args.load_format == "dummy":
        return ""
    folder = local_folder(
        server_args.model_path, server_args.revision, server_args.download_dir
    )
    names = weight_names(folder) if folder is not None else None
    beginning = beginning.format(layers=config.num_hidden_layers)
    if names is None or any(one.startswith(beginning) for one in names):
        return ""
    return f"holds no weights {beginning}*"
