"""Heads for multi-token prediction, taken from the target's own checkpoint: the same
tokens as the target alone, and as many a pass as a reference outside the server."""

from functools import partial

import pytest

from tests.integration import test_models
from tests.integration.test_models import ON_REQUEST, ids_of
from tests.support.tiny_engine import SHOW_ALL_ENV, TinyEngine
from tests.support.tiny_models import FAMILIES
from tests.support.tiny_mtp import NAMES, build_with_mtp

STEPS = 4
ANSWER_TOKENS = 40
prompts_of = partial(test_models.prompts_of, length=52)
NUM_PROMPTS = 6
FIXED = ("--no-speculative-parse-adaptive",)
FLAGS = (
    *("--speculative-algorithm", "PARSE", "--speculative-parse-compose", "mtp"),
    *("--speculative-parse-client-options", "all"),
    *("--speculative-parse-eagle-steps", str(STEPS)),
    *("--speculative-parse-segmenter", "fixed:4", "--chunked-prefill-size", "48"),
    *("--max-total-tokens", "2048", "--max-running-requests", "8"),
)
EXACT, LENGTH = {"parse_mode": "exact"}, {"max_new_tokens": ANSWER_TOKENS}


class Served:
    def __init__(
        self, name: str, folder, *flags: str, num_ranks: int = 1, **environment: str
    ):
        self.name, target, draft = name, folder / "target", folder / "draft"
        self.reference = build_with_mtp(name, target)
        FAMILIES["llama"].build_draft(draft)
        self.engine = TinyEngine(
            [
                *("--model-path", str(target), *FLAGS, *flags),
                *("--speculative-draft-model-path", str(draft)),
            ],
            log=str(folder / "engine.log"),
            num_ranks=num_ranks,
            environment=environment,
        )


@pytest.fixture(scope="module", params=sorted(set(NAMES) - ON_REQUEST))
def served(request, tmp_path_factory):
    one = Served(request.param, tmp_path_factory.mktemp(request.param), *FIXED)
    yield one
    one.engine.close()


def test_exact_rounds_write_the_targets_tokens_in_as_few_passes_as_they_can(served):
    """Red if the head reads another state, token, position or slot than the reference,
    or lacks it behind a cached prompt: answers would need other passes."""
    engine, prompts = served.engine, prompts_of(NUM_PROMPTS)
    expected, ids = [], []
    for concurrency in (8, 1):
        exact = engine.run(prompts, concurrency, custom=EXACT, **LENGTH)
        ids = ids or ids_of(exact)
        expected = expected or [
            served.reference.passes(p, a.ids, STEPS)
            for p, a in zip(prompts, exact, strict=True)
        ]
        assert ids_of(exact) == ids
        assert all(set(a.report["drafted_by"]) == {"mtp"} for a in exact)
        assert [a.report["target_passes"] for a in exact] == expected
    assert min(a.cached for a in exact) > 0
    assert sum(expected) < 0.8 * NUM_PROMPTS * (ANSWER_TOKENS - 1)
    alone = engine.run(prompts, 8, custom={"parse_mode": "off"}, **LENGTH)
    assert ids == ids_of(alone)


@pytest.mark.parametrize("recover", [1, "all"])
def test_where_nothing_is_valid_the_head_writes_what_the_target_does(served, recover):
    """Red if the head does not draft in recovery, or a token stands that the target did
    not choose."""
    engine, prompts = served.engine, prompts_of(4, seed=9)
    alone = engine.run(prompts, 4, custom={"parse_mode": "off"}, **LENGTH)
    custom = {"parse_threshold": 2.0, "parse_recover_segments": recover}
    found = engine.run(prompts, 4, custom=custom, **LENGTH)
    assert ids_of(found) == ids_of(alone)
    assert {a.report["mode"] for a in found} == {"semantic"}
    assert sum(a.report["kept_by"].get("mtp", 0) for a in found) > len(found)
    assert sum(a.report["draft_tokens"] for a in found) > 0


@pytest.mark.combines("head", "tensor parallelism")
def test_two_ranks_show_the_same_tokens_of_a_chain(tmp_path):
    """Red if a rank has other rows in a pass than the first: the collective ends the
    server."""
    flags, prompts = ("--tp-size", "2"), prompts_of(4)
    one = Served("glm4_moe", tmp_path, *flags, num_ranks=2, **{SHOW_ALL_ENV: "1"})
    try:
        alone = one.engine.run(prompts, 4, custom={"parse_mode": "off"}, **LENGTH)
        found = one.engine.run(prompts, 4, custom=EXACT, **LENGTH)
    finally:
        one.engine.close()
    assert ids_of(found) == ids_of(alone)
    passes = one.reference.passes
    expected = [passes(p, a.ids, STEPS) for p, a in zip(prompts, found, strict=True)]
    assert [a.report["target_passes"] for a in found] == expected
