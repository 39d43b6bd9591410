"""Which processes serve PARSE."""

from types import SimpleNamespace

import pytest
from sglang.srt import runtime_context

from sglang_parse.integration.active import serves_parse


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [("PARSE", True), ("parse", True), ("EAGLE3", False), (None, False)],
)
def test_the_published_algorithm_decides(monkeypatch, algorithm, expected):
    """Red if hooks act on servers of other algorithms, or not on ours."""
    context = SimpleNamespace(is_config_namespace_published=lambda name: name == "spec")
    spec = SimpleNamespace(speculative_algorithm=algorithm)
    monkeypatch.setattr(runtime_context, "get_context", lambda: context)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    assert serves_parse() is expected


def test_a_process_without_configuration_does_not():
    """Red if a hook raises before SGLang has published its arguments."""
    assert serves_parse() is False
