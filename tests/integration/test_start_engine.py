"""`sglang.Engine(...)` serves PARSE; its settings come from SGLANG_PARSE_CONFIG.

The same engine is the backend of a program, through EngineBackend.
"""

import json

import pytest

from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from sglang_parse.embedded.task import (
    Problem,
    make_problems,
    own_phrasing,
    render_step,
)
from tests.support.client import report
from tests.support.warm_servers import run_script

PROBLEMS = make_problems(3, seed=52)

SCRIPT = """
import json, sys

import sglang as sgl
from sglang_parse import parse_gen, parse_verify
from sglang_parse.frontend import EngineBackend


@sgl.function
def program(s, question, draft):
    s += sgl.user(question)
    forks = s.fork(2)
    forks += sgl.assistant_begin()
    forks[0] += parse_verify("text", draft)
    forks[1] += parse_gen("text", 160, draft=draft, mode="semantic", temperature=0.0)
    result = [(f["text"], f.get_meta_info("text")["parse"][0]) for f in forks]
    s += "ASSISTANT: " + sgl.gen("choice", choices=["of course", "zzz"])
    return result, s["choice"]


def run_programs(engine, request):
    with EngineBackend(engine, "chatml") as backend:
        arguments = request["arguments"]
        states = program.run_batch(arguments, backend=backend)
        stream = program.run(**arguments[0], backend=backend, stream=True)
        pieces, text = list(stream.text_iter()), stream.text()
        results = [[s.ret_value, str(s.error())] for s in states]
        backend.flush_cache()
        streamed = {"pieces": pieces, "text": text, "error": str(stream.error())}
        return {"results": results, "streamed": streamed}


def main():
    request = json.loads(sys.argv[1])
    engine = sgl.Engine(**request["engine"])

    def generate():
        return engine.generate(
            input_ids=request["input_ids"], sampling_params=request["sampling_params"]
        )

    try:
        result = generate()
        programs = run_programs(engine, request)
        result["again"] = generate()["output_ids"]  # the loop is the engine's again
        print("RESULT " + json.dumps([result, programs]))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def other(pool):
    """A server that runs already; all others make room for the engine."""
    name = next(reversed(pool.alive), "small")
    for used_before in list(pool.alive)[:-1]:
        pool.stop(used_before)
    return pool.get(name)


def test_engine_serves_parse_with_settings_of_a_file(other, prompts, tmp_path):
    """Red if Engine refuses PARSE, ignores the file, or answers unlike the server."""
    config = tmp_path / "parse.json"
    config.write_text(json.dumps({"mode": "exact", "window": 24}))
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT)
    sampling = {"temperature": 0, "max_new_tokens": 40}
    request = {
        "engine": {
            "model_path": str(TARGET_PATH),
            "speculative_algorithm": "PARSE",
            "speculative_draft_model_path": str(DRAFT_PATH),
            "log_level": "error",
        },
        "input_ids": prompts[0],
        "sampling_params": sampling,
        "arguments": [
            {"question": p.prompt, "draft": answer_wrong_at_3(p)} for p in PROBLEMS
        ],
    }
    text = run_script(
        script,
        json.dumps(request),
        env={"SGLANG_PARSE_CONFIG": str(config)},
        timeout_s=400,
    )
    lines = [s for s in text.splitlines() if s.startswith("RESULT ")]
    assert lines, text[-3000:]
    result, programs = json.loads(lines[0].removeprefix("RESULT "))
    assert report(result)["mode"] == "exact"
    expected = other.generate(
        prompts[0], max_new_tokens=40, custom={"parse_mode": "off"}
    )
    assert result["output_ids"] == expected["output_ids"]
    assert result["again"] == result["output_ids"]
    check_programs(programs)


def valid_steps(problem: Problem) -> str:
    return "".join(render_step(problem, i, own_phrasing("B", i)) for i in (1, 2))


def answer_wrong_at_3(problem: Problem) -> str:
    wrong = problem.totals[3] - 1 if problem.totals[3] else 1
    return valid_steps(problem) + render_step(problem, 3, "B1", total=wrong)


def check_programs(programs) -> None:
    """The engine's answers to `program`, and what became of the drafts in them."""
    streamed = programs["streamed"]
    assert streamed["error"] == "None" and streamed["text"].count("<|im_end|>") == 1
    # SGLang drops the end of a stream whose reader is slower than the program.
    assert streamed["text"].startswith("".join(streamed["pieces"])) and any(
        streamed["pieces"]
    )
    for problem, (value, error) in zip(PROBLEMS, programs["results"], strict=True):
        assert error == "None"
        ((kept, verify), (answer, counts)), choice = value
        valid = valid_steps(problem)
        # Texts that come at once share the rows of a step.
        assert kept == valid and verify["target_passes"] in (1, 2)
        assert verify["cut"]["segments"] == 2
        assert answer.startswith(valid) and "\nAnswer: " in answer
        assert counts["mode"] == "semantic" and counts["kept_client_tokens"] > 0
        assert choice in ("of course", "zzz")
