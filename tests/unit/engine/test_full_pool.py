"""Rounds over a pool of KV slots that runs full.

The scheduler reserves four slots for each request and retracts one where there are not
as many. Where it goes on, a round has to find all it takes: SGLang raises where it does
not, which ends the server.
"""

import pytest

from sglang_parse.options.server import ParseConfig
from tests.support.fake_engine import (
    FakeDrafter,
    FakeServer,
    FakeSlots,
    FakeTarget,
    make_request,
)

PROMPT = (10,) * 20
RESERVE = 4  # SGLang's, where a decode step has one token or two


class FullPool(FakeSlots):
    """`free` slots in pages of one token."""

    def extend_rows(self, batch, lens):
        self.take(batch.reqs, lens)

    def trim_rows(self, batch, lens):
        for req, n in zip(batch.reqs, lens, strict=True):
            spare = max(0, req.kv.kv_allocated_len - n - RESERVE)
            self.free += spare
            req.kv.kv_allocated_len -= spare

    def take(self, reqs, lens) -> None:
        for req, n in zip(reqs, lens, strict=True):
            self.free -= max(0, n - req.kv.kv_allocated_len)
            req.kv.kv_allocated_len = max(n, req.kv.kv_allocated_len)
        assert self.free >= 0, "the server ends"

    def reserve(self, reqs) -> bool:
        """As the scheduler does before a decode step; False where it would retract."""
        lens = [len(r.origin_input_ids) + len(r.output_ids) - 1 + RESERVE for r in reqs]
        held = [r.kv.kv_allocated_len for r in reqs]
        missing = sum(max(0, n - h) for n, h in zip(lens, held, strict=True))
        if missing > self.free:
            return False
        self.take(reqs, lens)
        return True


def letter(tokens) -> int:
    return 4 + len(tokens) % 7


@pytest.mark.parametrize("bs", [2, 8])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("mode", ["exact", "semantic"])
def test_a_full_pool_never_ends_the_server(mode, adaptive, bs):
    """Red if a round takes a slot that its windows do not count, such as the one for
    the token behind a draft."""
    config = ParseConfig(segmenter="line", adaptive=adaptive)
    for spare in range(4 * bs, 4 * bs + 60):
        pool = FullPool(num_free=bs * len(PROMPT) + spare)
        model = FakeDrafter(
            lambda tokens: [letter(range(len(tokens) + k)) for k in range(16)]
        )
        server = FakeServer(
            FakeTarget(letter, lambda tokens: 0.9), [model], slots=pool, config=config
        )
        reqs = [
            make_request(mode, prompt=PROMPT, config=config, window=16)
            for _ in range(bs)
        ]
        for req in reqs:
            req.kv.kv_allocated_len = 0
        pool.take(reqs, [len(PROMPT)] * bs)
        while pool.reserve(reqs):
            server.quantum(*reqs)
