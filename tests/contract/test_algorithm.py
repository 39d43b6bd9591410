"""The algorithm object that SGLang dispatches on."""

import inspect

import pytest

from tests.support.signatures import parameters

pytestmark = pytest.mark.usefixtures("plugins")


def test_custom_algorithm_lacks_exactly_the_methods_we_add():
    """Red if SGLang starts to define one (drop ours), or calls another it lacks."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    from sglang_parse.plugin.algorithm import ParseAlgorithm

    def public(cls):
        return {
            n
            for n, v in vars(cls).items()
            if inspect.isfunction(v) and not n.startswith("_")
        }

    ours = {"carries_draft_hidden_states", "need_topk", "create_future_map"}
    for name in ours:
        assert not hasattr(CustomSpecAlgo, name)
        assert callable(getattr(SpeculativeAlgorithm, name))
        assert callable(getattr(ParseAlgorithm, name))
    lacking = {
        n for n in public(SpeculativeAlgorithm) if not hasattr(CustomSpecAlgo, n)
    }
    # Called for built-in algorithms only.
    assert lacking - ours <= {"get_speculative_worker_cls", "get_platform_worker_cls"}


def test_algorithm_is_no_built_in_one():
    """Red if PARSE takes an EAGLE-only branch of the scheduler by accident."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    parse = SpeculativeAlgorithm.from_string("PARSE")
    assert parse.is_speculative() and not parse.is_none()
    flags = [
        n for n in dir(parse) if n.startswith("is_") and callable(getattr(parse, n))
    ]
    answers = {n for n in flags if not parameters(getattr(parse, n))}
    assert {n for n in answers if getattr(parse, n)()} == {"is_some", "is_speculative"}
