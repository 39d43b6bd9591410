"""What goes back to the client: reports, figures, endpoints."""

import inspect
from types import SimpleNamespace

import pytest

from tests.support.signatures import parameters

pytestmark = pytest.mark.usefixtures("plugins")


def test_report_outlives_incremental_streaming():
    """Red if the report goes by the number of tokens sent before it, or if SGLang's
    slices are no longer what they were."""
    from sglang.srt.managers import tokenizer_manager

    from sglang_parse.plugin.report_streamer import keep_report

    original = tokenizer_manager._slice_streaming_output_meta_info
    original = getattr(original, "__wrapped__", original)
    meta_info = {"parse": [{"mode": "exact"}], "other": [1, 2, 3], "id": "x"}
    keep_report(original, meta_info, 2, ["parse", "other"])
    assert meta_info == {"parse": [{"mode": "exact"}], "other": [3], "id": "x"}
    plain = {"other": [1, 2, 3]}
    keep_report(original, plain, 2, ["parse", "other"])
    assert plain == {"other": [3]}


def test_streamer_adds_the_report_of_finished_requests(monkeypatch):
    """Red if the output streamer's seam moves or expects another shape."""
    from sglang.srt.managers.scheduler_components.output_streamer import (
        SchedulerOutputStreamer,
    )
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_parse.plugin import report_streamer as report
    from sglang_parse.reporting.report import RequestReport, attach

    assert SchedulerOutputStreamer.has_additional_customized_info is False
    parameters_ = parameters(SchedulerOutputStreamer.build_additional_customized_info)
    assert parameters_ == ["self", "reqs"]
    cls = report.streamer_class(SchedulerOutputStreamer)
    assert issubclass(cls, SchedulerOutputStreamer)
    assert report.streamer_class(SchedulerOutputStreamer) is cls

    class Req(SimpleNamespace):
        __hash__ = object.__hash__

    ended = {"output_ids": [5], "finished_len": None, "tokenizer": None, "rid": "r"}
    ended |= {"sampling_params": SamplingParams(), "finished_reason": None}
    done = Req(finished=lambda: True, **ended)
    running = Req(finished=lambda: False)
    other = Req(finished=lambda: True)
    attach(done, RequestReport("exact", "", False))
    attach(running, RequestReport("off", "grammar", False))
    streamer = object.__new__(cls)
    info = streamer.build_additional_customized_info([done, running, other])
    assert [len(v) for v in info["parse"]] == [1, 0, 0]
    assert info["parse"][0][0]["mode"] == "exact"
    assert streamer.build_additional_customized_info([other]) == {}


def test_endpoints_lack_what_we_add():
    """Red if SGLang learns of predictions or of reports in streams by itself."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.openai import protocol, serving_chat
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    fields = protocol.ChatCompletionRequest.model_fields
    assert "prediction" not in fields and "return_meta_info" in fields
    assert "return_meta_info" not in protocol.CompletionRequest.model_fields
    details = protocol.CompletionTokensDetails.model_fields
    assert "accepted_prediction_tokens" not in details
    source = inspect.getsource(serving_chat)
    assert "return_meta_info is not supported with streaming" in source
    assert inspect.isasyncgenfunction(inspect.unwrap(TokenizerManager.generate_request))
    setup = inspect.unwrap(http_server._setup_and_run_http_server)
    assert parameters(setup)[0] == "server_args"


@pytest.mark.contract_source
def test_an_answer_ends_as_we_expect():
    """Red if SGLang looks for the end of an answer by other rules than `num_kept`
    (plugin/stops.py), whose tests compare the two."""
    from sglang.srt.managers.schedule_batch import Req

    check = inspect.unwrap(Req._check_str_based_finish)
    assert parameters(check) == ["self", "new_accepted_len"]
    source = inspect.getsource(check)
    for used in ("self.tail_str(new_accepted_len)", "stop_str in self.decoded_text"):
        assert used in source
    assert "self.output_ids[-tail_len:]" in inspect.getsource(Req.tail_str)
    for name in ("stop_str_max_len", "stop_regex_max_len"):
        assert f"sampling_params.{name}" in inspect.getsource(Req._stop_match_tail_len)
    steps = inspect.getsource(Req.update_finish_state)
    asked = ("vocab_boundary", "str_based", "token_based", "max_new_tokens", "grammar")
    places = [steps.index(name) for name in asked]
    assert steps.count("self._check_") == 3 and places[0] < places[1] < places[2]


def test_configuration_says_which_algorithm_serves():
    """Red if `gating.serves_parse` asks SGLang in a way that it no longer knows."""
    from sglang.srt.runtime_context import get_context, get_spec

    from sglang_parse.plugin.gating import serves_parse

    assert get_context().is_config_namespace_published("nothing") is False
    assert callable(get_spec) and serves_parse() is False
