"""What an operator asks for and cannot have is an answer, and the scheduler goes on."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)

from sglang_parse.embedded import TARGET_PATH
from sglang_parse.shield import operator_calls
from sglang_parse.shield.operator_calls import (
    ask_for_memory,
    check_tensors,
    guard_memory,
    survive_tensors,
)
from sglang_parse.shield.seams import SHIELD_ENV

RELEASE, RESUME = ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput


@pytest.fixture(autouse=True)
def shield(monkeypatch):
    monkeypatch.setenv(SHIELD_ENV, "1")
    monkeypatch.setattr(operator_calls, "in_shielded_scheduler", lambda: True)


def scheduler(*, running=False, waiting=False, paused=False, device="cuda", left=()):
    """SGLang's manager of weights in the process of a scheduler."""

    def is_fully_idle(ignore_waiting):
        return not running and (ignore_waiting or not waiting)

    return SimpleNamespace(
        scheduler=SimpleNamespace(_engine_paused=paused),
        is_fully_idle=is_fully_idle,
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(device=device)),
        offload_tags=set(left),
        tp_cpu_group=None,
    )


def answer_of(asked, **state):
    """What the scheduler answers: "done" where SGLang does what is asked for."""
    answer = guard_memory(lambda *_: "done", scheduler(**state), asked)
    if answer != "done":
        kind = type(asked).__name__.replace("Input", "Output")
        assert type(answer) is getattr(io_struct, kind)
        return answer.rid
    return answer


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({}, "done"),
        ({"running": True}, "while requests run"),
        ({"waiting": True}, "while requests run"),
        ({"waiting": True, "paused": True}, "done"),  # as SGLang allows it
        ({"running": True, "paused": True}, "while requests run"),
        ({"running": True, "device": "cpu"}, "while requests run"),
        ({"device": "cpu"}, "on a GPU alone"),
    ],
)
def test_memory_is_released_where_nothing_runs(state, told):
    """Red if SGLang's assertion ends the scheduler, or an idle server keeps its
    memory."""
    assert told in answer_of(RELEASE(), **state)


@pytest.mark.parametrize(
    ("tags", "left", "told"),
    [
        (None, GPU_MEMORY_ALL_TYPES, "done"),
        (["weights"], ["weights"], "done"),
        (["weights"], ["kv_cache"], "tags are ['weights']; expected released ones"),
        (None, ["weights"], "now weights."),
        (None, [], "now none."),
    ],
)
def test_what_was_released_is_resumed(tags, left, told):
    """Red if SGLang looks up a tag that was never released, which ends the scheduler,
    or if memory that was released stays so."""
    assert told in answer_of(RESUME(tags=tags), left=left)
    assert "on a GPU alone" in answer_of(RESUME(), left=left, device="cpu")


@pytest.mark.parametrize("asked", [RELEASE(), RESUME()])
def test_a_refusal_reaches_the_operator(asked):
    """Red if the refusal of one of several schedulers is lost on its way, or if an
    answer without one is an error."""
    kind = type(asked).__name__.replace("Input", "Output")
    output = getattr(io_struct, kind)
    answers = [output()]

    async def send(obj):
        assert obj is asked
        return answers

    name = "release" if isinstance(asked, RELEASE) else "resume"
    manager = SimpleNamespace(server_args=None, auto_create_handle_loop=lambda: None)
    setattr(manager, f"{name}_memory_occupation_communicator", send)
    assert asyncio.run(ask_for_memory(None, manager, asked, "request")) is None
    answers.append(output(rid="No."))
    with pytest.raises(ValueError, match=r"^No\.$"):
        asyncio.run(ask_for_memory(None, manager, asked, "request"))


# -- Weights in tensors ----------


@pytest.fixture(scope="module")
def weights():
    return load_file(TARGET_PATH / "model.safetensors")


def load(named_tensors, **fields):
    """(whether SGLang was asked to load them, what is answered)."""
    asked = []

    def original(updater, tensors, **given):
        asked.append((tensors, given))
        return True, "Success"

    config = SimpleNamespace(model_path=str(TARGET_PATH))
    updater = SimpleNamespace(model_config=config)
    result = check_tensors(original, updater, named_tensors=named_tensors, **fields)
    assert asked in ([], [(named_tensors, fields)])
    return bool(asked), result


def test_tensors_that_do_not_fit_are_not_loaded(weights):
    """Red if one of them is loaded before the wrong one is seen, or if tensors are
    refused that fit, or whose shapes nobody knows."""
    *names, last = weights
    some = [(name, weights[name]) for name in names[:5]]
    wrong = (last, weights[last][:-1])
    unknown = ("another.weight", weights[last])
    sharded = (last, SimpleNamespace(values=[b""]))
    for one in ([], [(last, weights[last])], [unknown], [sharded]):
        assert load([*some, *one]) == (True, (True, "Success"))
    is_asked, (success, told) = load([*some, wrong])
    assert not is_asked and not success
    assert "has the shape" in told and told.endswith("nothing has been loaded.")
    metadata = [SimpleNamespace(name=last, shape=torch.Size([1]))]
    bucket = {"flattened_tensor": None, "metadata": metadata}
    assert not load(bucket, load_format="flattened_bucket")[0]
    # Shards of a rank, by the names of parameters.
    assert load([wrong], load_format="direct")[0]


@pytest.mark.parametrize("is_shielded", [True, False])
def test_tensors_that_cannot_be_loaded_are_an_answer(monkeypatch, is_shielded):
    """Red if the scheduler ends where a tensor cannot be loaded, if a rank leaves
    others at their barrier, or if the answer hides that some were loaded."""

    def fails(*_):
        raise KeyError("x.weight")

    waited = []
    barrier = lambda group: waited.append(group)  # noqa: E731
    monkeypatch.setattr(torch.distributed, "barrier", barrier)
    monkeypatch.setattr(operator_calls, "in_shielded_scheduler", lambda: is_shielded)
    if not is_shielded:
        with pytest.raises(KeyError):
            survive_tensors(fails, scheduler(), None)
        return
    answer = survive_tensors(fails, scheduler(), None)
    assert waited == [None] and answer.success is False
    assert "(KeyError: " in answer.message and "all of them again" in answer.message
