"""`sglang.Engine(...)` serves PARSE; its settings come from SGLANG_PARSE_CONFIG."""

import json

import pytest

from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from tests.support.client import report
from tests.support.warm_servers import run_script

SCRIPT = """
import json, sys

import sglang as sgl


def main():
    request = json.loads(sys.argv[1])
    engine = sgl.Engine(**request["engine"])
    try:
        result = engine.generate(
            input_ids=request["input_ids"], sampling_params=request["sampling_params"]
        )
        print("RESULT " + json.dumps(result))
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
    }
    text = run_script(
        script,
        json.dumps(request),
        log=tmp_path / "engine.log",
        env={"SGLANG_PARSE_CONFIG": str(config)},
    )
    lines = [s for s in text.splitlines() if s.startswith("RESULT ")]
    assert lines, text[-3000:]
    result = json.loads(lines[0].removeprefix("RESULT "))
    assert report(result)["mode"] == "exact"
    expected = other.generate(
        prompts[0], max_new_tokens=40, custom={"parse_mode": "off"}
    )
    assert result["output_ids"] == expected["output_ids"]
