"""What identifies a target: hashes of its configuration and of its weights.

Of each tensor, its name, type, shape and some bytes of its middle are read. That takes
milliseconds, and another training changes every tensor.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

from sglang_parse.probe.linear_probe import TargetHashes
from sglang_parse.sgl.model_folder import local_folder

#: Keys of a config.json that say nothing about the model.
IGNORED = ("_name_or_path", "transformers_version")
SAMPLE_BYTES = 256


def fingerprint(path: str, revision: str | None = None) -> TargetHashes:
    """Of a model folder, or a Hugging Face name whose files are on this machine.

    Raises ValueError, as the end of "PATH ...", where there are no files to read.
    """
    folder = local_folder(path, revision)
    if folder is None:
        raise ValueError("is not on this machine as a folder")
    config = folder / "config.json"
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
        kept = {k: v for k, v in values.items() if k not in IGNORED}
        weights = hashlib.sha256()
        files = sorted(folder.glob("*.safetensors"))
        for file in files:
            weights.update(_file_digest(file))
    except (OSError, ValueError, KeyError, struct.error) as e:
        raise ValueError(f"has files that cannot be read ({e})") from e
    if not files:
        raise ValueError("has no safetensors to take a fingerprint of")
    canonical = json.dumps(kept, sort_keys=True).encode()
    config_hash = hashlib.sha256(canonical).hexdigest()
    return TargetHashes(config_hash[:32], weights.hexdigest()[:32])


def _file_digest(file: Path) -> bytes:
    found = hashlib.sha256()
    with open(file, "rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(length))
        for name in sorted(k for k in header if k != "__metadata__"):
            row = header[name]
            start, end = row["data_offsets"]
            found.update(json.dumps([name, row["dtype"], row["shape"]]).encode())
            f.seek(8 + length + max(start, (start + end - SAMPLE_BYTES) // 2))
            found.update(f.read(min(SAMPLE_BYTES, end - start)))
    return found.digest()
