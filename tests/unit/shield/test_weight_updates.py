"""Weights that cannot be read leave the server as it was."""

from types import SimpleNamespace

import pytest
from sglang.srt import runtime_context

from sglang_parse.shield.seams import SHIELD_ENV
from sglang_parse.shield.weight_updates import survive_update


class Updater:
    """Of one runner; notes what it is told to read."""

    def __init__(self):
        self.model_config = SimpleNamespace(model_path="old")
        self.read = []

    def update_weights_from_disk(self, path, load_format):
        self.model_config.model_path = path
        self.read.append((path, load_format))


class Manager:
    def __init__(self):
        self.updaters = [Updater(), Updater()]

    def _select_runners(self):
        return [("target", SimpleNamespace(weight_updater=u)) for u in self.updaters]


@pytest.fixture(autouse=True)
def shielded(monkeypatch):
    monkeypatch.setenv(SHIELD_ENV, "1")
    monkeypatch.setattr(runtime_context, "get_server_args", SimpleNamespace)


def update(original, load_format="auto"):
    manager = Manager()
    asked = SimpleNamespace(model_path="new", load_format=load_format)
    return survive_update(original, manager, asked), manager.updaters


def result(success):
    def original(manager, request):
        for updater in manager.updaters:
            updater.model_config.model_path = request.model_path
        return SimpleNamespace(success=success, message="")

    return original


def fails(manager, request):
    result(True)(manager, request)
    raise RuntimeError("a shape")


def test_an_unknown_format_is_told():
    """Red if a format that SGLang does not know ends its scheduler."""
    output, updaters = update(fails, "zzz")
    assert not output.success
    assert output.message.startswith("load_format is 'zzz'; expected one of auto, pt,")
    assert [u.read for u in updaters] == [[], []]


def test_the_old_weights_come_back():
    """Red if another model's weights stay, in part, or end the scheduler."""
    output, updaters = update(fails)
    assert not output.success and "RuntimeError: a shape" in output.message
    assert [u.read for u in updaters] == [[("old", "auto")]] * 2


@pytest.mark.parametrize(("success", "path"), [(True, "new"), (False, "old")])
def test_what_sglang_answers_is_kept(success, path):
    """Red if an answer of SGLang's is lost, or a refused path is what the next update
    would go back to."""
    output, updaters = update(result(success))
    assert output.success is success
    assert [u.model_config.model_path for u in updaters] == [path] * 2
    assert [u.read for u in updaters] == [[], []]


def test_other_servers_fail_as_before(monkeypatch):
    """Red if a server that nobody shields behaves otherwise."""
    monkeypatch.setenv(SHIELD_ENV, "0")
    with pytest.raises(RuntimeError, match="a shape"):
        update(fails)
