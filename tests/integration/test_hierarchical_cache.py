"""Prompts that SGLang's hierarchical cache brings back from host memory.

The pool holds a few of the prompts, and host memory all of them. The witness has the
same models, a pool for everything, and no such cache.
"""

from functools import partial

import pytest

from tests.integration import test_models
from tests.integration.test_models import ids_of
from tests.support.tiny_engine import TinyEngine
from tests.support.tiny_models import FAMILIES

POOL, NUM_PROMPTS, ANSWER_TOKENS = 512, 10, 24
LENGTH = {"max_new_tokens": ANSWER_TOKENS}
# All of them together are longer than the pool.
prompts_of = partial(test_models.prompts_of, length=52)
FLAGS = (
    *("--speculative-algorithm", "PARSE", "--no-speculative-parse-adaptive"),
    *("--speculative-parse-client-options", "all"),
    *("--speculative-parse-segmenter", "fixed:4", "--speculative-parse-window", "8"),
    *("--chunked-prefill-size", "48", "--max-running-requests", "4"),
)
HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "8")
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}


@pytest.fixture(scope="module", params=["llama", "deepseek_v3"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param].build(folder / "target")
    FAMILIES["llama"].build_draft(folder / "draft")
    return folder


def start(folder, *flags: str, **environment: str) -> TinyEngine:
    return TinyEngine(
        [
            *("--model-path", str(folder / "target"), *FLAGS, *flags),
            *("--speculative-draft-model-path", str(folder / "draft")),
        ],
        log=str(folder / "engine.log"),
        environment=environment,
    )


@pytest.fixture(scope="module")
def witness(folder):
    engine = start(folder, "--max-total-tokens", "4096")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def served(folder):
    engine = start(folder, "--max-total-tokens", str(POOL), *HOST)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def retracting(folder):
    """The same, and SGLang takes requests back, which frees what was brought back."""
    engine = start(folder, "--max-total-tokens", str(POOL), *HOST, **RETRACT)
    yield engine
    engine.close()


def long_prompts():
    both = zip(prompts_of(NUM_PROMPTS), prompts_of(NUM_PROMPTS, seed=4), strict=True)
    return [[*one, *other] for one, other in both]


@pytest.mark.combines("hierarchical cache", "radix cache")
@pytest.mark.parametrize("mode", ["exact", "off"])
def test_answers_behind_what_is_brought_back_are_the_targets(retracting, witness, mode):
    """Red if a pass reads KV that another prompt left in its slots."""
    prompts, custom = long_prompts(), {"parse_mode": mode}
    expected = witness.run(prompts, 4, custom={"parse_mode": "off"}, **LENGTH)
    retractions = 0
    for concurrency in (1, 4, 1):
        found = retracting.run(prompts, concurrency, custom=custom, **LENGTH)
        assert ids_of(found) == ids_of(expected)
        retractions += sum(a.retractions for a in found)
    # More than the pool holds: it came from host memory.
    assert sum(a.cached for a in found) > 1.2 * POOL
    assert retractions > 0


def test_a_draft_reads_again_what_is_brought_back(served, witness):
    """Red if the draft model takes another prompt's KV for its own: it would agree less
    than where it reads each prompt for the first time."""
    prompts, custom = long_prompts(), {"parse_mode": "exact"}
    witness.flush()
    first = witness.run(prompts, 1, custom=custom, **LENGTH)
    served.run(prompts, 1, custom=custom, **LENGTH)
    again = served.run(prompts, 1, custom=custom, **LENGTH)
    assert min(a.cached for a in again) > 0 == max(a.cached for a in first)
    kept = [[a.report["kept_by"] for a in answers] for answers in (first, again)]
    assert kept[0] == kept[1]


def test_verdicts_behind_what_is_brought_back_are_the_same(served, witness):
    """Red if a pass judges before its prompt has come back."""
    prompts, custom = long_prompts(), {"parse_threshold": 0.0}
    witness.flush()
    found = []
    for engine in (witness, served, served):
        answers = engine.run(prompts, 1, custom=custom, **LENGTH)
        found.append([(a.ids, a.report["judged_segments"]) for a in answers])
    assert found[0] == found[1] == found[2]
    assert all(num for _, num in found[0])
