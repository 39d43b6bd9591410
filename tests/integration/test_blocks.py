"""DFLASH and DSpark drafts of random weights beside a draft model, on real servers."""

from __future__ import annotations

import pytest

from sglang_parse.embedded import TARGET_PATH
from tests.integration.conftest import COMMON, PARSE
from tests.support.block_drafts import write_block_draft
from tests.support.client import Server, outcome, report
from tests.support.warm_servers import WarmServer

pytestmark = pytest.mark.own_server

KINDS = ("dflash", "dspark")
# The target's LM head makes "." of this token's embedding.
WRITES_DOTS = 379


@pytest.fixture(scope="module", params=["dflash", "dspark"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks")
    draft = write_block_draft(
        folder / "draft",
        TARGET_PATH,
        share=0.05,
        mask_token_id=WRITES_DOTS,
        markov="vanilla" if request.param == "dspark" else "",
    )
    flags = (
        *(*COMMON, *PARSE, "--no-speculative-parse-adaptive"),
        *("--speculative-parse-compose", request.param),
        *("--speculative-parse-eagle-model-path", str(draft)),
    )
    with WarmServer(flags, "blocks", folder / "server.log") as process:
        yield Server(process.url)


@pytest.fixture(scope="module")
def expected(pool, prompts):
    answers = pool.get("target").generate_all(prompts[:3], 3)
    return [outcome(r) for r in answers]


@pytest.mark.parametrize("custom", [{"parse_mode": "exact"}, {"parse_threshold": 2}])
def test_answers_are_the_targets_own(server, prompts, expected, custom):
    """Red if a token of a block is kept that the target does not choose, or if what
    the draft writes spoils the KV of anything else."""
    found = server.generate_all(prompts[:3], 3, custom=custom)
    assert [outcome(r) for r in found] == expected
    drafted, kept = (
        sum(sum(report(r)[name].get(kind, 0) for kind in KINDS) for r in found)
        for name in ("drafted_by", "kept_by")
    )
    assert drafted > 8 * len(found) and kept > 0, (drafted, kept)
