"""Model folders that cannot be loaded, found by their files."""

import json
import shutil

import pytest

from sglang_parse.embedded import DRAFT_PATH, HEAD_PATH, TARGET_PATH
from sglang_parse.sgl import model_folder


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(DRAFT_PATH, tmp_path / "draft")


@pytest.mark.parametrize("path", [TARGET_PATH, DRAFT_PATH, HEAD_PATH])
def test_the_embedded_models_pass(path):
    """Red if a sound folder is refused."""
    assert model_folder.problem_of(str(path)) == ""


@pytest.mark.parametrize(
    "path", ["gpt2", "owner/name", "Qwen/Qwen2.5-0.5B", "s3://bucket/a/b"]
)
def test_names_that_are_not_on_this_disk_pass(path):
    """Red if a model of a hub is taken for a missing folder."""
    assert model_folder.problem_of(path) == ""


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "a/b/c", "../x"])
def test_missing_folders_are_told(path, tmp_path, monkeypatch):
    """Red if a path that can only be a folder goes on to the hub."""
    monkeypatch.chdir(tmp_path)  # whatever stands beside a checkout
    assert "is not a folder" in model_folder.problem_of(path)


def test_a_file_and_an_empty_name_are_told(tmp_path):
    """Red if a file in place of a folder ends in `KeyError: 'regular_tokens'`."""
    file = tmp_path / "model"
    file.write_text("x")
    assert "is a file" in model_folder.problem_of(str(file))
    assert "is empty" in model_folder.problem_of(" ")


def test_an_empty_folder_lacks_everything(tmp_path):
    """Red if a folder without files is left to the loader."""
    told = model_folder.problem_of(str(tmp_path))
    assert "config.json, weights" in told
    assert "weights" not in model_folder.problem_of(str(tmp_path), needs_weights=False)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["{", "[]"])
def test_broken_json_names_the_file(folder, name, text):
    """Red if a broken file is not named."""
    (folder / name).write_text(text)
    assert name in model_folder.problem_of(str(folder))


def test_weights_cut_in_half_are_told(folder):
    """Red if the file's size is not compared with its header."""
    file = next(folder.glob("*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    told = model_folder.problem_of(str(folder))
    assert f"has a broken {file.name} (" in told and "download it again" in told


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


def test_a_folder_without_tokenizer_is_told_where_one_is_needed(folder):
    """Red if a draft without tokenizer goes on to the loader."""
    assert not model_folder.problem_of(str(folder), needs_tokenizer=True)
    for file in folder.glob("token*"):
        file.unlink()
    told = model_folder.problem_of(str(folder), needs_tokenizer=True)
    assert "lacks a tokenizer" in told
    assert not model_folder.problem_of(str(folder))
