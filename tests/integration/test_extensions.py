"""Extensions of an installed package on a real server, without a draft model.

The package of docs/extending.md is installed into a folder of this test. Beside it is
one that is broken.
"""

import math
import os
from pathlib import Path

import pytest

from sglang_parse.embedded.task import make_problems
from tests.integration.conftest import ALGORITHM, COMMON
from tests.support.client import Server, chat_ids, outcome, report
from tests.support.packages import install, install_project
from tests.support.warm_servers import WarmServer

PACKAGE = Path(__file__).parents[1] / "support" / "extension_package"
QUESTION = "\n\nIs this right so far? Answer:"
TOLERANCE = 1e-3  # as in test_scores.py
BROKEN = """def raising(draft):
    raise ValueError("not today")

def falling(draft):
    return range(len(draft.pieces), 0, -1)
"""
ENTRY_POINTS = {
    "sglang_parse.segmenters": {
        "raising": "parse_broken:raising",
        "falling": "parse_broken:falling",
        "missing": "parse_broken:missing",
    },
    "sglang_parse.judges": {"missing": "parse_broken:missing"},
    "sglang_parse.drafters": {"missing": "parse_broken:missing"},
}


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    install_project(folder, PACKAGE)
    install(folder, "broken", ENTRY_POINTS, {"parse_broken": BROKEN})
    flags = (
        *(*COMMON, *ALGORITHM, "--no-speculative-parse-adaptive"),
        *("--speculative-parse-judge", "yes"),
        *("--speculative-parse-segmenter", "clause"),
    )
    with pytest.MonkeyPatch.context() as environment:
        path = (str(folder), *filter(None, [os.environ.get("PYTHONPATH")]))
        environment.setenv("PYTHONPATH", os.pathsep.join(path))
        server = WarmServer(flags, "extended", folder / "server.log")
    with server:
        yield server


@pytest.fixture
def server(process):
    one = Server(process.url)
    yield one
    assert one.is_alive(), "the test left the server dead"


@pytest.fixture(scope="module")
def problems(tokenizer):
    return [chat_ids(tokenizer, p.prompt) for p in make_problems(6, seed=31)]


@pytest.fixture(scope="module")
def expected(process, problems):
    """What the target writes alone."""
    server = Server(process.url)
    answers = server.generate_all(problems, 3, custom={"parse_mode": "off"})
    assert all(report(r)["draft_tokens"] == 0 for r in answers)
    return [outcome(r) for r in answers]


def state(server) -> dict:
    import requests

    info = requests.get(server.url + "/server_info", timeout=60).json()
    return info["internal_states"][0]["parse"]


def test_segmenter_cuts_and_judge_scores(server, tokenizer, problems, expected):
    """Red if the built-in rule cuts, or the built-in question is asked, in place of the
    package's; the client's text is the target's own answer."""
    prompt, text = problems[0], expected[0][1]
    result = server.generate(
        prompt,
        max_new_tokens=1,
        custom={"parse_verify": text, "parse_threshold": 0.0},
    )
    found = report(result)
    assert (found["judge"], found["mode"]) == ("yes", "verify")
    pieces = [s["text"] for s in found["segments"]]
    assert "".join(pieces) == text and len(pieces) == found["judged_segments"] > 3
    ends = {",", ".", "\n"}
    assert all(ends & set(piece) for piece in pieces[:-1])
    (yes,) = tokenizer.encode(" Yes", add_special_tokens=False)[-1:]
    suffix = tokenizer.encode(QUESTION, add_special_tokens=False)
    prefix: list[int] = []
    for segment in found["segments"][:3]:
        prefix += segment["token_ids"]
        alone = server.generate(
            [*prompt, *prefix, *suffix],
            max_new_tokens=1,
            top={"return_logprob": True, "token_ids_logprob": [yes]},
        )
        ((logprob, *_),) = alone["meta_info"]["output_token_ids_logprobs"][0]
        assert segment["score"] == pytest.approx(math.exp(logprob), abs=TOLERANCE)


def test_drafter_without_a_model_serves_alone(server, problems):
    """Red if requests of such a server are not semantic, or tokens that a package's
    drafter wrote are counted as nobody's."""
    custom = {"parse_threshold": 0.0, "parse_segmenter": "fixed:4"}
    found = report(server.generate(problems[1], custom=custom))
    assert found["mode"] == "semantic" and "fallback" not in found
    assert found["drafted_by"]["lookup"] >= found["kept_by"]["lookup"] > 0
    assert found["kept_by"]["lookup"] == found["kept_tokens"]
    assert found["draft_tokens"] == 0 and found["judged_segments"] > 0
    sums = state(server)
    assert sums["drafted_by"]["lookup"] > 0 and sums["settings"]["judge"] == "yes"


def test_exact_mode_with_a_packages_drafter(server, problems, expected):
    """Red if a token of a package's drafter stands that the target would not write."""
    results = server.generate_all(problems, 3, custom={"parse_mode": "exact"})
    assert [outcome(r) for r in results] == expected
    assert sum(report(r)["kept_by"].get("lookup", 0) for r in results) > 0


@pytest.mark.parametrize("name", ["raising", "falling"])
def test_segmenter_that_fails_leaves_the_targets_answers(
    server, problems, expected, name
):
    """Red if what a broken segmenter does changes a token, or ends a request or the
    server; any verdict would pass here."""
    before = state(server)["extension_errors"].get("segmenter", {}).get(name, 0)
    custom = {"parse_segmenter": name, "parse_threshold": 0.0}
    results = server.generate_all(problems, 3, custom=custom)
    assert [outcome(r) for r in results] == expected
    assert {report(r)["judged_segments"] for r in results} == {0}
    assert {report(r)["mode"] for r in results} == {"semantic"}
    errors = state(server)["extension_errors"]
    assert errors["segmenter"][name] > before


def test_what_is_asked_for_in_vain_is_refused(server, problems):
    """Red if a broken or unknown name, or a question nobody asks, passes."""
    for custom, message in (
        (
            {"parse_segmenter": "missing"},
            "the segmenter 'missing' of broken 1.0 (entry",
        ),
        ({"parse_segmenter": "claus"}, "expected one of line, paragraph, sentence, st"),
        ({"parse_judge_suffix": "Right?"}, "this server's judge is 'yes', which takes"),
    ):
        reply = server.post("/generate", server.body(problems[0], custom=custom))
        assert reply.status_code == 400 and message in reply.text
