"""Model folders that cannot be loaded, found by their files."""

import json
import shutil

import pytest

from sglang_parse.embedded import (
    DRAFT_HEAD_PATH,
    DRAFT_PATH,
    HEAD_PATH,
    TARGET_PATH,
)
from sglang_parse.sgl import model_folder


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(DRAFT_PATH, tmp_path / "draft")


@pytest.mark.parametrize("path", [TARGET_PATH, DRAFT_PATH, HEAD_PATH, DRAFT_HEAD_PATH])
def test_the_embedded_models_pass(path):
    """Red if a sound folder is refused."""
    assert model_folder.problem_of(str(path)) == ""


@pytest.mark.parametrize(
    "path", ["gpt2", "owner/name", "Qwen/Qwen2.5-0.5B", "s3://bucket/a/b"]
)
def test_names_that_are_not_on_this_disk_pass(path):
    """Red if a model of a hub is taken for a missing folder."""
    assert model_folder.problem_of(path) == ""


@pytest.mark.parametrize("data", [b"abc", b"\xff" * 40, b"\x02" + bytes(7) + b"[]"])
def test_files_without_a_header_are_told(folder, data):
    """Red if another file under the name passes."""
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(data)
    assert f"has a broken {file.name} (" in model_folder.problem_of(str(folder))


def test_missing_shards_are_told(folder):
    """Red if a shard of the index may be missing."""
    shards = {"weight_map": {"a": "model-00002-of-00002.safetensors"}}
    (folder / model_folder.INDEX).write_text(json.dumps(shards))
    assert "model-00002-of-00002" in model_folder.problem_of(str(folder))
