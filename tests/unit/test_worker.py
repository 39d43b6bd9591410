"""The worker's pure helpers: one cut and one logprob need per request."""

from types import SimpleNamespace

from sglang_parse.config import ParseConfig
from sglang_parse.decide import Cut
from sglang_parse.plan import build_verify_plan
from sglang_parse.request import RequestOptions
from sglang_parse.stages import choose_cuts, logprob_needs
from sglang_parse.state import RequestState


def options(mode: str = "semantic", **settings) -> RequestOptions:
    config = ParseConfig(mode=mode, **settings)
    names = ("threshold", "keep_rule", "segmenter", "window", "judge_suffix")
    names += ("recover_segments",)
    return RequestOptions(
        mode=mode,
        exact_tail=config.exact_tail,
        compose=False,
        report=False,
        fallback="",
        **{n: getattr(config, n) for n in names},
    )


def state(mode: str, **settings) -> RequestState:
    return RequestState(options(mode, **settings), frozenset(), None, report=None)


def test_choose_cuts_by_each_requests_own_options():
    """Red if a request is cut by its neighbour's mode, threshold or keep rule."""
    plan = build_verify_plan(
        seq_lens=[5] * 5,
        bonus_tokens=[0] * 5,
        draft_tokens=[[1] * 6] * 5,
        boundaries=[(2, 4)] * 3 + [(), ()],
        suffix_tokens=[[9]] * 5,
    )
    states = [
        state("semantic"),
        state("semantic", threshold=0.2),
        state("semantic", keep_rule="longest", exact_tail=False),
        state("exact"),
        state("off"),
    ]
    scores = [(0.4, 0.9)] * 3 + [(), ()]
    assert choose_cuts(plan, scores, states, [0] * 5) == [
        Cut(0, 2, False, rejected_end=2),
        Cut(4, 4, True),
        Cut(4, 4, True),
        Cut(0, 6, False),
        Cut(0, 6, False),
    ]


def test_logprob_needs_follow_the_rows():
    """Red if a row gets the logprob settings of another request."""
    batch = SimpleNamespace(
        return_logprob=True,
        top_logprobs_nums=[0, 5],
        token_ids_logprobs=[None, [3, 4]],
    )
    needs = logprob_needs(batch, [1, 1, 0])
    assert needs.top_logprobs_nums == [5, 5, 0]
    assert needs.token_ids_logprobs == [[3, 4], [3, 4], None]
    batch.return_logprob = False
    assert not logprob_needs(batch, [0]).return_logprob
