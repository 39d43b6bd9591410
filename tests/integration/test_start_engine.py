"""`sglang.Engine(...)` serves PARSE; its settings come from SGLANG_PARSE_CONFIG."""

import json
import os
import subprocess
import sys

import pytest
from client import report

from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH

SCRIPT = """
import json, sys

import sglang


def main():
    request = json.load(sys.stdin)
    engine = sglang.Engine(**request["engine"])
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
    """A server that has run to this end; all others make room for the engine."""
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
    env = {"OMP_NUM_THREADS": "1", **os.environ, "SGLANG_PARSE_CONFIG": str(config)}
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=env,
        timeout=400,
    )
    lines = [s for s in done.stdout.splitlines() if s.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    result = json.loads(lines[0].removeprefix("RESULT "))
    assert report(result)["mode"] == "exact"
    expected = other.generate(
        prompts[0], max_new_tokens=40, custom={"parse_mode": "off"}
    )
    assert result["output_ids"] == expected["output_ids"]
