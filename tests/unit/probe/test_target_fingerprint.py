"""A fingerprint tells models apart, and is the same for the same model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_parse.embedded import DRAFT_PATH
from sglang_parse.probe.target_fingerprint import fingerprint


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(DRAFT_PATH, tmp_path / "model")


def test_each_tensor_and_each_setting_counts(folder):
    """Red if a model with other weights or another configuration passes for this."""
    own = fingerprint(str(folder))
    assert own == fingerprint(str(DRAFT_PATH))
    weights = load_file(folder / "model.safetensors")
    for name in list(weights)[:3]:
        changed = {**weights, name: weights[name] + 0.01 * torch.ones(1)}
        save_file(changed, folder / "model.safetensors")
        assert fingerprint(str(folder)).weights != own.weights
    config = json.loads((folder / "config.json").read_text())
    for key, value, same in (("transformers_version", "9", True), ("rope_theta", 1, 0)):
        (folder / "config.json").write_text(json.dumps({**config, key: value}))
        assert (fingerprint(str(folder)).config == own.config) is bool(same)


def test_a_folder_without_weights_is_refused(folder):
    """Red if a probe could be bound to nothing."""
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no safetensors"):
        fingerprint(str(folder))
    with pytest.raises(ValueError, match="not on this machine"):
        fingerprint("nobody/has-this-model")
