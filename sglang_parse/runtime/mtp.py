"""Whether a target's own checkpoint has a head for multi-token prediction (MTP)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_parse.options.table import MTP, flag_name
from sglang_parse.runtime.families import SEE, mtp_weights_of
from sglang_parse.runtime.model_folder import weight_names


def check_mtp(server_args: Any) -> None:
    """The target's checkpoint has a head that PARSE knows. Raises ValueError.

    A checkpoint that is not here yet passes, and so does one whose weights SGLang makes
    up.
    """
    from sglang.srt.utils.hf_transformers_utils import get_config

    path = server_args.model_path
    trust = server_args.trust_remote_code
    config = get_config(path, trust_remote_code=trust, revision=server_args.revision)
    name = (getattr(config, "architectures", None) or ["the model"])[0]
    flag = f"{flag_name('compose')} is {MTP!r}"
    beginning = mtp_weights_of(name)
    if not beginning:
        raise ValueError(
            f"{flag}, and PARSE knows no such head of {name}; leave it out ({SEE})."
        )
    text = config.get_text_config()
    beginning = beginning.format(layers=text.num_hidden_layers)
    told = _missing(server_args, text, beginning)
    if told:
        raise ValueError(
            f"{flag}, and --model-path {path!r} {told}; leave it out, or take a "
            "checkpoint with its head for multi-token prediction."
        )


def _missing(server_args: Any, config: Any, beginning: str) -> str:
    """What the checkpoint lacks, or ""."""
    if beginning.startswith("model.layers.") and not getattr(
        config, "num_nextn_predict_layers", 0
    ):
        return "says of no num_nextn_predict_layers in its config.json"
    if server_args.load_format == "dummy":
        return ""
    folder = _folder_of(server_args)
    names = weight_names(folder) if folder is not None else None
    if names is None or any(one.startswith(beginning) for one in names):
        return ""
    return f"holds no weights {beginning}*"


def _folder_of(server_args: Any) -> Path | None:
    """Where the checkpoint lies, None if it is not here."""
    place = Path(server_args.model_path)
    if place.is_dir():
        return place
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        found = snapshot_download(
            server_args.model_path,
            revision=server_args.revision,
            cache_dir=server_args.download_dir,
            local_files_only=True,
        )
    except (OSError, HfHubHTTPError, HFValidationError):
        return None
    return Path(found)
