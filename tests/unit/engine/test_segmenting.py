"""Where drafts are judged; after a rejection the target writes on to a boundary before
verdicts count again."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sglang_parse.engine.failures import GuardedDrafters
from sglang_parse.engine.round import RoundEngine
from sglang_parse.engine.segmenting import SEAM_TOKENS, Segmenting, first_empty
from sglang_parse.judging.decide import Cut, Decision, choose_cut, decide, exact_cut
from sglang_parse.judging.segmenter import REACH, RULES, Segmenter
from sglang_parse.options.request import REST
from sglang_parse.options.server import ParseConfig
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round_records import Kept, RequestRound, Round
from sglang_parse.requests.state import RequestState
from tests.support.fake_engine import FakeSlots

TEXTS = ["a", "b", "\n", "c", "</think>", ""]
LINE, CLOSING, SPECIAL = 2, 4, 5


def segmenting(texts=TEXTS) -> Segmenting:
    """Over a small vocabulary."""
    config = ParseConfig(segmenter="line", max_segments=16)
    return Segmenting(config, texts, closing=[CLOSING])


def state(
    recovering: int = 0,
    limit: int = 1,
    segmenter="line",
    judge_every: int = 0,
    exact_head: int = 0,
    **more,
) -> RequestState:
    options = SimpleNamespace(
        mode="semantic",
        segmenter=segmenter,
        recover_limit=limit,
        judge_every=judge_every,
        exact_head=exact_head,
    )
    judge = SimpleNamespace(suffix=(9,) * 5)
    return RequestState(
        options, frozenset(), judge, None, recovering=recovering, **more
    )


def record(one: RequestState, draft: Draft | None = None, output=(0,)) -> RequestRound:
    req = SimpleNamespace(output_ids=list(output))
    draft = draft or Draft()
    return RequestRound(req, one, 0, 10, 1, output_len=1, draft=draft)


def segmented(states, drafts, *, room: int = 100, **more) -> Round:
    """A round behind its segment stage; more: fields of the round."""
    requests = [record(one, d) for one, d in zip(states, drafts, strict=True)]
    round = Round(None, requests, **more)
    segmenting().segment(round, room=room)
    return round


def cut(states, drafts, **more):
    """Boundaries to judge and exact ends of a round."""
    round = segmented(states, drafts, **more)
    return [r.boundaries for r in round], [r.exact_end for r in round]


DRAFT = Draft((0, LINE, 1, LINE, 3, 3, LINE, 0))  # boundaries 2, 4, 7


@pytest.mark.parametrize(
    ("recovering", "boundaries", "exact_end"),
    [
        (0, (2, 4, 7), 0),
        (1, (4, 7), 2),
        (2, (7,), 4),
        (3, (), 7),
        (4, (), 8),
        (1 << 40, (), 8),
    ],
)
def test_leading_segments_are_the_targets(recovering, boundaries, exact_end):
    """Red if a segment the target has to write is judged instead."""
    assert cut([state(recovering)], [DRAFT]) == ([boundaries], [exact_end])


@pytest.mark.parametrize(
    ("found_at", "boundaries", "exact_end"),
    [
        (None, (2, 4, 7), 0),  # the text was never left
        (6, (4, 7), 2),  # found again inside the line that the draft goes on with
        (5, (4, 7), 2),  # a token before
        (4, (2, 4, 7), 0),  # at the end of a line, so its next one is whole
    ],
)
def test_the_end_of_a_clients_segment_is_not_judged(found_at, boundaries, exact_end):
    """Red if a judge is shown an answer whose last words alone are the client's."""
    client = SimpleNamespace(found_at=found_at)
    output = (0, 1, 1, LINE, 1, 1) if found_at != 4 else (0, 1, 1, LINE)
    draft = Draft(DRAFT.tokens, num_client=len(DRAFT.tokens))
    r = record(state(client=client), draft, output)
    segmenting().segment(Round(None, [r]), room=100)
    assert (r.boundaries, r.exact_end) == (boundaries, exact_end)


@pytest.mark.parametrize(
    ("num_head", "recovering", "boundaries", "exact_end"),
    [(1, 0, (2, 4, 7), 1), (3, 0, (4, 7), 3), (3, 1, (4, 7), 3), (1, 1, (4, 7), 2)],
)
def test_the_heads_tokens_are_never_judged(num_head, recovering, boundaries, exact_end):
    """Red if a verdict keeps a token of the EAGLE-3 head that the target denies."""
    draft = Draft(DRAFT.tokens, num_token_level=num_head)
    found = cut([state(recovering)], [draft])
    assert found == ([boundaries], [exact_end])


@pytest.mark.parametrize(
    ("asked", "every", "num_suspect", "boundaries"),
    [
        (0, 1, 0, (2, 4, 7)),
        (0, 2, 0, (2, 7)),
        (0, 3, 0, (7,)),
        (0, 9, 0, (7,)),
        (1, 3, 0, (2, 4, 7)),
        (3, 1, 0, (7,)),
        (0, 3, 5, (2, 4, 7)),
        (3, 3, 1, (2, 4, 7)),
    ],
)
def test_every_nth_boundary_is_judged(asked, every, num_suspect, boundaries):
    """Red if the last boundary is left out, the request's own setting is, or the wrong
    segment of several that failed together is not looked for one by one."""
    one = state(judge_every=asked, num_suspect=num_suspect)
    assert cut([one], [DRAFT], judge_every=every) == ([boundaries], [0])


def test_a_clients_text_is_judged_at_every_boundary():
    """Red if less of a client's text is kept than its valid prefix."""
    text = replace(DRAFT, num_client=3)
    assert cut([state()], [text], judge_every=3) == ([(2, 4, 7)], [0])


def test_what_the_target_writes_itself_is_not_suspect():
    """Red if suffixes are spent on a part that no longer is the draft's."""
    one = state(1, num_suspect=2)
    assert cut([one], [DRAFT], judge_every=2) == ([(7,)], [2])


@pytest.mark.parametrize("every", [1, 3])
def test_segments_have_their_own_length_however_few_are_judged(every):
    """Red if leaving boundaries out makes segments look longer, so that windows and
    distances grow by themselves."""
    round = segmented([state(), state(1)], [DRAFT, DRAFT], judge_every=every)
    assert [r.segments.num_found for r in round] == [3, 2]


@pytest.mark.parametrize(
    ("max_rows", "boundaries"), [(24, (2, 4, 7)), (23, (2, 7)), (9, ()), (3, ())]
)
def test_suffixes_are_rows_of_the_pass(max_rows, boundaries):
    """Red if judge suffixes outgrow the memory left for activations."""
    engine = RoundEngine(
        target=None,
        slots=FakeSlots(max_rows),
        drafters=GuardedDrafters([]),
        planner=None,
        segmenting=segmenting(),
        ranks=None,
    )
    round = Round(SimpleNamespace(tree_cache=None), [record(state(), DRAFT)])
    engine.segment(round)
    assert round.requests[0].boundaries == boundaries


def test_recovery_goes_on_where_no_suffix_fits():
    """Red if a short pool lets a draft pass that only the target could confirm."""
    found = cut([state(1)], [DRAFT], room=4)
    assert found == ([()], [2])


def recover(stage: Segmenting, r: RequestRound, tokens, num_judged: int | None) -> int:
    """Segments that the target still writes after a round; num_judged: of one in which
    a verdict failed behind so many tokens."""
    decision, cut = Decision(tuple(tokens), num_judged or 0, 0, ()), Kept().cut
    if num_judged is not None:
        cut = Cut(num_judged, num_judged, False, rejected_end=num_judged + 1)
    r.kept = Kept(cut, decision)
    stage.recover(r)
    return r.state.recovering


def left(tokens, num_judged=None, *, recovering=0, limit=1) -> int:
    return recover(segmenting(), record(state(recovering, limit)), tokens, num_judged)


def test_a_rejection_is_recovered_up_to_the_next_boundary():
    """Red if drafting under verdicts resumes inside the segment that was rejected, or
    a boundary in front of the rejection ends the recovery."""
    assert left([0, LINE, 1], 2) == 1
    assert left([0, LINE, 1, LINE], 2) == 0
    assert left([0, LINE, 1, LINE], 2, limit=3) == 2
    assert left([0, LINE, 1], 2, limit=0) == 0
    assert left([0, 1]) == 0
    assert left([0, 1], recovering=2) == 2
    assert left([0, LINE, 1], recovering=2) == 1
    assert left([LINE, LINE, 0, LINE], recovering=1) == 0


def test_a_round_that_is_not_judged_follows_every_draft_token_by_token():
    """Red if a draft token stands without a verdict and without the target's consent,
    or waits for a boundary that nobody judges."""
    found = cut([state(), state(1)], [DRAFT, DRAFT], judged=False)
    assert found == ([(), ()], [8, 8])
    tail = choose_cut(
        (), (), num_draft_tokens=8, threshold=0.5, keep_rule="first-failure",
        exact_tail=True, exact_end=8,
    )  # fmt: skip
    assert tail.rows == exact_cut(8).rows
    for target in ([*DRAFT.tokens, 1], [0, LINE, 0, *DRAFT.tokens[3:], 1]):
        got, exact = (decide(c, DRAFT.tokens, target) for c in (tail, exact_cut(8)))
        assert (got.accept_tokens, got.pending) == (exact.accept_tokens, ())


HEAD_AND_THINKING = [
    # Output before the draft, draft, recovering, expected (boundaries, exact end).
    ([0], DRAFT.tokens, 0, ((4, 7), 3)),
    ([0, 0, 0], DRAFT.tokens, 0, ((2, 4, 7), 1)),
    ([0] * 9, DRAFT.tokens, 0, ((2, 4, 7), 0)),
    ([0] * 9, DRAFT.tokens, 2, ((7,), 4)),
    ([0], DRAFT.tokens[:3], 0, ((), 3)),
    # Behind the end of thinking, in the output and in the draft.
    ([0] * 9 + [CLOSING], DRAFT.tokens, 0, ((7,), 4)),
    ([0] * 9 + [CLOSING, 0, 0], DRAFT.tokens, 0, ((4, 7), 2)),
    ([0] * 9 + [CLOSING, 0, 0, 0, 0], DRAFT.tokens, 0, ((2, 4, 7), 0)),
    ([0] * 9, (0, LINE, 0, CLOSING, LINE, 0, 0, LINE), 0, ((2, 4), 0)),
    ([0] * 9, (0, LINE, 0, CLOSING, LINE, 0, 0), 0, ((2, 4), 0)),
    ([0], (0, LINE, CLOSING, LINE, 0, 0, 1, LINE), 0, ((8,), 7)),
    ([0] * 9, (0, LINE, CLOSING, LINE, 0, 0, 1, LINE), 2, ((8,), 7)),
    # No verdict carries a special token.
    ([0] * 9, (0, LINE, 0, LINE, SPECIAL, 0, LINE), 0, ((2, 4), 0)),
    ([0] * 9, (0, LINE, 0, SPECIAL, 0, LINE), 0, ((2, 3), 0)),
    ([0] * 9, (SPECIAL, 0, LINE, 0, LINE), 0, ((), 0)),
    ([0, 0], (0, SPECIAL, SPECIAL, 0, LINE), 0, ((), 2)),
    ([0] * 9, (0, SPECIAL, LINE, 0, LINE), 1, ((5,), 3)),
    ([0] * 9, (0, SPECIAL, LINE, 0, SPECIAL, 0, LINE), 1, ((4,), 3)),
]


@pytest.mark.parametrize(("output", "draft", "recovering", "found"), HEAD_AND_THINKING)
def test_the_head_of_an_answer_and_of_a_turn_is_exact(output, draft, recovering, found):
    """Red if a verdict can keep one of the first 4 tokens of an answer, or of what
    follows its thinking, wherever these lie."""
    one = record(state(recovering, exact_head=4), Draft(tuple(draft)), output)
    one.output_len = len(output)
    segmenting().segment(Round(None, [one]), room=100)
    assert (one.boundaries, one.exact_end) == found


class Request:
    """A request whose rounds are told as texts of tokens; num_ready: tokens of the
    output that are decided ahead of it, as behind a judged client's text."""

    def __init__(self, segmenter, before=(), *, limit=1, num_ready=0, recovering=0):
        self.texts: list[str] = []
        self.state = state(recovering, limit, segmenter)
        self.tokens = self.ids(before)
        self.num_ready = num_ready

    def ids(self, pieces) -> list[int]:
        self.texts += [p for p in dict.fromkeys(pieces) if p not in self.texts]
        return [self.texts.index(p) for p in pieces]

    def record(self, draft: Draft | None = None) -> RequestRound:
        split = max(0, len(self.tokens) - self.num_ready)
        self.state.ready = tuple(self.tokens[split:])
        return record(self.state, draft, self.tokens[:split])

    def round(self, *pieces, num_judged=None) -> int:
        """num_judged: of a rejected round."""
        tokens = self.ids(pieces)
        recover(segmenting(self.texts), self.record(), tokens, num_judged)
        self.tokens += tokens
        return self.state.recovering

    def draft(self, *pieces, ended=False):
        """Boundaries and exact end of a draft."""
        r = self.record(Draft(tuple(self.ids(pieces)), ended))
        segmenting(self.texts).segment(Round(None, [r]), room=1000)
        return r.boundaries, r.exact_end


@pytest.mark.parametrize("segmenter", ["step", "sentence"])
@pytest.mark.parametrize("num_ready", [0, 4])
def test_a_mark_ends_no_sentence_before_the_next_one_begins(segmenter, num_ready):
    """Red if the "." of "12.5", alone in its round, counts as a recovered segment, or
    the end of a sentence is lost because its round does not show it."""
    req = Request(segmenter, ["it", " costs"], num_ready=num_ready)
    assert req.round(" 12", num_judged=0) == 1
    assert [req.round(piece) for piece in (".", "5", " kg", ".")] == [1] * 4
    assert req.state.num_begun == 5
    assert req.round(" Then") == 0
    assert req.state.num_begun == 0


@pytest.mark.parametrize("num_ready", [0, 5])
def test_a_sentence_inside_a_step_ends_no_recovery(num_ready):
    """Red if a run without a step start is cut into sentences, where the step began in
    an earlier round or before the rejection."""
    req = Request("step", ["x", "\n"], num_ready=num_ready)
    assert req.round("Step 3", ":", " 12", num_judged=0) == 1
    assert req.round(".", " Then", " add") == 1
    assert req.draft(".", " Then", " 4", "\n", "Step 4", "\n", "Step 5") == ((6,), 4)
    assert req.round(" 4", ".", "\n") == 0
    req = Request("step", ["Step 3", ":", " 12"], num_ready=num_ready)
    assert req.round(".", " Then", " add", num_judged=0) == 1


def test_tokens_are_counted_over_rounds():
    """Red if `fixed:N` recovers only where N tokens are accepted in one round, or the
    draft's head ends elsewhere than the recovery."""
    req = Request("fixed:8", ["a"])
    assert req.round(*"abc", num_judged=1) == 1
    assert req.round(*"abc") == 1
    assert req.state.num_begun == 5
    assert req.draft(*"abcdefghijklmnopqrst") == ((11, 19), 3)
    assert req.draft(*"ab") == ((), 2)
    assert req.round(*"abc") == 0
    assert req.state.num_begun == 0
    assert req.draft(*"abcdefghi") == ((8,), 0)


@pytest.mark.parametrize(
    ("segmenter", "run", "num_judged"),
    [
        ("fixed:2", "abcde", 2),
        ("line", "a\nb\nc", 2),
        ("step", ["Step 1", "\n", "Step 2", " a", "\n", "Step 3"], 2),
        ("step", ["a", ".", " b", ".", " c"], 2),
    ],
)
def test_a_boundary_behind_the_cut_already_counts(segmenter, run, num_judged):
    """Red if a rejected round that itself ends the segment goes on recovering."""
    req = Request(segmenter)
    assert req.round(*run, num_judged=num_judged) == 0
    assert req.state.num_begun == 0
    req = Request(segmenter, limit=2)
    assert req.round(*run, num_judged=num_judged) == 1
    req = Request(segmenter, limit=REST)
    assert req.round(*run, num_judged=num_judged) == REST
    assert req.state.num_begun == 0


def test_several_segments_are_counted_over_rounds():
    """Red if a boundary counts in every round after it, or what lies behind it is
    forgotten."""
    req = Request("fixed:4", limit=2)
    assert req.round(*"abc", num_judged=0) == 2
    assert req.draft(*"abcdefghij") == ((9,), 5)
    assert req.round(*"abc") == 1
    assert req.state.num_begun == 2
    assert req.draft(*"abcdefghij") == ((6, 10), 2)
    assert req.round("a") == 1
    assert req.round("a") == 0
    req = Request("step", limit=2)
    assert req.round("Step 1", ":", num_judged=0) == 2
    assert req.round(" a", "\n", "Step 2") == 1
    assert req.round(":", " b", ".", " c") == 1
    assert req.round("\n") == 0


def test_the_rest_is_recovered_whatever_it_holds():
    """Red if `all` ends, or keeps what is never looked at."""
    req = Request("line", limit=REST)
    assert req.round("a", "\n", num_judged=0) == REST
    assert req.round("a", "\n", "b", "\n") == REST
    assert req.state.is_exact and req.state.num_begun == 0
    assert req.draft("a", "\n", "b") == ((), 3)


def test_another_rejection_begins_a_new_segment():
    """Red if tokens of an earlier recovery count for the next one."""
    req = Request("fixed:8", recovering=1)
    assert req.round(*"abcde") == 1
    assert req.round(*"abcde", num_judged=3) == 1
    assert req.state.num_begun == 2


def test_the_draft_shows_where_the_written_sentence_ends():
    """Red if a draft is judged from a sentence end on that only the draft sees."""
    req = Request("step", ["it", " costs", " 12"], recovering=1)
    assert req.round(".") == 1
    assert req.draft(" Then", " add", ".", " So") == ((3,), 1)
    assert req.draft("5", " kg") == ((), 2)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("segmenter", [*RULES, "fixed:5"])
def test_exact_end_and_recovery_agree(segmenter, seed):
    """Red if a request whose draft stood up to its head's end recovers on."""
    rng = random.Random(seed)
    pieces = ["a", " b", " 12", ".", ".", "5", " Then", "\n", "\n", "Step 4", ":"]
    pieces += ["x(", ")"]
    req = Request(segmenter, rng.choices(pieces, k=20))
    req.round(*rng.choices(pieces, k=3), num_judged=rng.choice([0, 1]))
    for _ in range(20):
        if not req.state.recovering:
            req.round(*rng.choices(pieces, k=2), num_judged=0)
            continue
        draft = rng.choices(pieces, k=rng.randint(1, 12))
        boundaries, exact_end = req.draft(*draft)
        assert all(b > exact_end for b in boundaries)
        num = rng.randint(1, len(draft))
        left = req.round(*draft[:num])
        if exact_end < len(draft) and num >= exact_end:
            assert left == 0


def test_a_long_segment_costs_a_bounded_look_back(monkeypatch):
    """Red if every round decodes all that was written since the rejection."""
    seen = []
    boundaries = Segmenter.boundaries

    def spy(self, tokens, **settings):
        seen.append((len(tokens), len(settings["previous_text"])))
        return boundaries(self, tokens, **settings)

    monkeypatch.setattr(Segmenter, "boundaries", spy)
    req = Request("line", ["a"] * 3000, recovering=1)
    req.state.num_begun = 2000
    assert req.round("b") == 1
    assert seen == [(REACH + 1, SEAM_TOKENS)]


def test_room_is_shared_among_those_that_are_judged():
    """Red if one request takes all suffixes of a pass, or what it leaves is lost."""
    short = Draft(DRAFT.tokens[:4])
    many = [state(), state(), state()]
    found, _ = cut(many, [DRAFT, short, DRAFT], room=5 * 6)
    assert found == [(2, 7), (2, 4), (2, 7)]
    found, _ = cut(many, [short, Draft((0, LINE)), DRAFT], room=5 * 6)
    assert found == [(2, 4), (2,), (2, 4, 7)]


def test_a_request_that_cannot_be_cut_stops_nobody_else(caplog):
    """Red if one request's text ends the round of all."""
    bad = state(segmenter="no such")
    round = segmented([bad, state()], [DRAFT, DRAFT])
    first, second = round
    assert isinstance(first.error, ValueError) and first.draft == Draft()
    assert first.boundaries == () and second.boundaries == (2, 4, 7)


@pytest.mark.parametrize("cuts", [(0, 2, 6), (2, 2, 6), (2, 6, 6)])
def test_first_empty_segment_is_found(cuts):
    """Red if a client's segment without tokens is judged as one."""
    starts = (0, *cuts)
    assert first_empty(cuts) == next(k for k in range(3) if starts[k] == cuts[k])
    assert first_empty((2, 4, 6)) is None
