"""Counters of one request, each defined once."""

import json
import random
from collections.abc import Callable
from dataclasses import asdict

import pytest
from tokenizers import decoders

from sglang_parse.options.table import HEADS
from sglang_parse.reporting.report import RequestReport, RoundRecord
from sglang_parse.reporting.text_offsets import CONTEXT, PART
from sglang_parse.requests.client_text import ClientText


def report(want_segments: bool = True, fallback: str = "") -> RequestReport:
    return RequestReport("semantic", fallback, want_segments)


FIRST = [40, 41, 42, 43]  # output tokens before the round


def first_failure_round(r: RequestReport, output_len: int = 4) -> None:
    """Draft of 6, boundaries 2 and 5, the second rejected, one token matched."""
    r.record(
        RoundRecord(
            output_len=output_len,
            draft_tokens=[1, 2, 3, 4, 5, 6],
            drafted_by=[("model", 4)],
            num_client=1,
            boundaries=[2, 5],
            scores=[0.9, 0.1],
            num_judged=2,
            num_matched=1,
            accept_tokens=[1, 2, 3, 99],
        )
    )


def as_dict(r: RequestReport, output_ids: list[int]) -> dict:
    r.finish(output_ids)
    return r.as_dict(output_ids, lambda ids: "".join(f"<{i}>" for i in ids))


def test_round_is_counted():
    """Red if a counter changes its meaning: see the docstring of RequestCounters."""
    r = report()
    first_failure_round(r)
    assert asdict(r.counters) == {
        "target_passes": 1,
        "draft_tokens": 4,
        "eagle_draft_tokens": 0,
        "eagle_kept_tokens": 0,
        "client_tokens": 1,
        "judged_segments": 2,
        "probe_segments": 0,
        "kept_segments": 1,
        "judged_tokens": 5,
        "kept_tokens": 3,
        "kept_client_tokens": 1,
        "matched_tokens": 1,
        "written_tokens": 5,
    }


@pytest.mark.parametrize("head", HEADS)
def test_a_recovering_head_is_counted_as_agreement(head):
    """Red if tokens that the target confirmed count as judged, a head that failed
    counts as kept, or one kind of head is not counted."""
    r = report()
    stood = {
        "draft_tokens": [1, 2, 3, 4, 5, 6],
        "drafted_by": [(head, 3), ("model", 3)],
        "exact_end": 2,
        "boundaries": [5],
        "scores": [0.9],
    }
    r.record(RoundRecord(0, [1, 2, 3, 4, 5, 99], num_judged=5, **stood))
    counts = r.counters
    assert (counts.kept_tokens, counts.matched_tokens) == (5, 2)
    assert (counts.judged_tokens, counts.kept_segments) == (3, 1)
    assert (counts.eagle_draft_tokens, counts.eagle_kept_tokens) == (3, 3)
    r.record(RoundRecord(6, [1, 98], num_matched=1, **stood))
    assert (counts.kept_tokens, counts.matched_tokens) == (6, 3)
    assert (counts.kept_segments, counts.eagle_kept_tokens) == (1, 4)
    spans = as_dict(r, [1, 2, 3, 4, 5, 99, 1, 98])["segments"]
    assert [(s["outcome"], s["start"], len(s["token_ids"])) for s in spans] == [
        ("kept", 0, 2), ("kept", 2, 3), ("written", 5, 1),
        ("rejected", 6, 2), ("rejected", 6, 3), ("kept", 6, 1), ("written", 7, 1),
    ]  # fmt: skip
    assert [s["score"] for s in spans[:5]] == [None, 0.9, None, None, None]


def test_a_stop_inside_a_head_is_taken_back():
    """Red if counters keep tokens that a stop string cut off."""
    r = report()
    r.record(
        RoundRecord(
            0, [1, 2, 3, 4, 9], [1, 2, 3, 4], drafted_by=[("eagle3", 2)], exact_end=2,
            boundaries=[3], scores=[0.9], num_judged=3, num_matched=1,
        )
    )  # fmt: skip
    r.finish([1])
    counts = r.counters
    assert (counts.kept_tokens, counts.matched_tokens, counts.written_tokens) == (
        1,
        1,
        0,
    )
    assert counts.eagle_kept_tokens == 1


def test_counters_add_up_over_rounds():
    """Red if a round replaces what earlier rounds counted."""
    r = report()
    first_failure_round(r)
    first_failure_round(r, 8)
    assert r.counters.target_passes == 2
    assert r.counters.kept_tokens + r.counters.written_tokens == 12


def test_plain_rounds_are_one_written_span():
    """Red if a round without draft counts anything else, or tokens get lost."""
    r = report()
    r.record(RoundRecord(3, [7]))
    r.record(RoundRecord(4, [8]))
    assert r.counters.written_tokens == 5
    assert r.counters.target_passes == 2
    assert r.counters.kept_tokens == r.counters.judged_tokens == 0
    (span,) = as_dict(r, [4, 5, 6, 7, 8])["segments"]
    assert span["token_ids"] == (4, 5, 6, 7, 8)


@pytest.mark.parametrize("want_segments", [True, False])
@pytest.mark.parametrize("reason", ["", "verdicts do not pay here"])
def test_a_plain_round_is_a_round_without_a_draft(want_segments, reason):
    """Red if the short way for plain rounds counts something else."""
    plain, usual = report(want_segments), report(want_segments)
    first_failure_round(plain)
    first_failure_round(usual)
    for at in (8, 9, 12):
        plain.record_plain(at, reason)
        usual.record(RoundRecord(at, accept_tokens=[50 + at], not_judged=reason))
    assert plain == usual
    ids = [*FIRST, 1, 2, 3, 99, *range(60, 64), 70]
    assert as_dict(plain, ids) == as_dict(usual, ids)


def test_segments_tell_the_round_in_order():
    """Red if spans, offsets, texts or scores move to another segment."""
    r = report()
    first_failure_round(r)
    result = as_dict(r, [*FIRST, 1, 2, 3, 99])
    fields = ("origin", "outcome", "start", "token_ids", "score", "text", "text_start")
    assert [tuple(s[f] for f in fields) for s in result["segments"]] == [
        ("target", "written", 0, tuple(FIRST), None, "<40><41><42><43>", 0),
        ("client", "kept", 4, (1,), 0.9, "<1>", 16),
        ("draft", "kept", 5, (2,), 0.9, "<2>", 19),
        ("draft", "rejected", 6, (3, 4, 5), 0.1, "<3><4><5>", 22),
        ("draft", "kept", 6, (3,), None, "<3>", 22),
        ("target", "written", 7, (99,), None, "<99>", 25),
    ]


def test_segments_name_their_drafter():
    """Red if a part of a segment is put down to another drafter, one is lost where two
    wrote, or one drafter's rounds are told apart."""
    r = report()
    r.record(
        RoundRecord(
            4, [1, 2, 3, 4, 5, 99], [1, 2, 3, 4, 5, 6], num_client=1, boundaries=[4],
            written_by=[("ngram", 1), ("ngram", 1), ("model", 3)], scores=[0.9],
            num_judged=4, num_matched=1,
        )
    )  # fmt: skip
    result = as_dict(r, [*FIRST, 1, 2, 3, 4, 5, 99])
    found = [(s["origin"], s["drafter"], s["token_ids"]) for s in result["segments"]]
    assert found[1:] == [
        ("client", "", (1,)),
        ("draft", "ngram", (2, 3)),
        ("draft", "model", (4,)),
        ("draft", "model", (5,)),
        ("target", "", (99,)),
    ]


@pytest.mark.parametrize("num_left", range(9))
def test_a_stop_inside_a_round_is_not_counted(num_left):
    """Red if tokens after a stop string or end token stay in counters or segments."""
    r = report()
    first_failure_round(r)
    output = [*FIRST, 1, 2, 3, 99][:num_left]
    result = as_dict(r, output)
    spans = [s for s in r.trail.spans if s.outcome != "rejected"]
    assert [t for s in spans for t in s.token_ids] == output
    if num_left >= 4:
        assert result["kept_tokens"] + result["written_tokens"] == num_left
        assert result["kept_tokens"] == min(3, num_left - 4)
        assert result["kept_client_tokens"] == min(1, num_left - 4)


TEXT = list(range(100, 150))
STOPPED = [*TEXT, 7, 200, 201, 8, 9]  # what `decided_ahead` decides


def decided_ahead(want_segments: bool = True) -> RequestReport:
    """A text of 50 kept whole with a token of the target's behind it, then a round of
    two kept tokens of the head's, one by agreement, and a plain one."""
    r = report(want_segments)
    r.client = ClientText(TEXT)
    r.record(
        RoundRecord(
            0, STOPPED[:51], TEXT, num_client=50, boundaries=[25, 50],
            scores=[0.9, 0.9], num_judged=50,
        )
    )  # fmt: skip
    r.client.propose(STOPPED[:51])
    r.record(
        RoundRecord(
            51, [200, 201, 8], [200, 201], drafted_by=[("eagle3", 2)], boundaries=[1],
            scores=[0.9], num_judged=1, num_matched=1,
        )
    )  # fmt: skip
    r.client.propose(STOPPED[:54])
    r.record(RoundRecord(54, [9]))
    return r


@pytest.mark.parametrize("num_left", [0, 1, 20, 24, *range(49, 56)])
def test_a_stop_several_rounds_back_is_not_counted(num_left):
    """Red if tokens decided ahead count where a stop cut them off."""
    output = STOPPED[:num_left]
    result = as_dict(decided_ahead(), output)
    head = min(2, max(0, num_left - 51))
    kept = min(50, num_left) + head
    assert result["kept_tokens"] == kept
    assert result["kept_client_tokens"] == min(50, num_left)
    assert result["eagle_kept_tokens"] == head
    assert result["matched_tokens"] == max(0, head - 1)
    assert result["written_tokens"] == num_left - kept
    assert result["accepted_client_text_tokens"] == min(50, num_left)
    assert "".join(
        s["text"] for s in result["segments"] if s["outcome"] != "rejected"
    ) == "".join(f"<{i}>" for i in output)


def test_verdicts_count_whatever_a_stop_cuts():
    """Red if a stop turns segments that passed into rejected ones on /metrics."""
    result = as_dict(decided_ahead(), STOPPED[:20])
    assert result["judged_segments"] == result["kept_segments"] == 3
    assert result["target_passes"] == 3 and result["client_tokens"] == 50


def test_a_request_goes_on_after_a_cut():
    """Red if a retraction's cut, or the end told twice, is taken back again."""
    r = decided_ahead(want_segments=False)
    r.finish(STOPPED[:20])
    r.record(RoundRecord(20, [1, 2, 3], [1, 2], num_judged=1, num_matched=1))
    output = [*STOPPED[:20], 1, 2, 3]
    counts = r.counters
    for num_left, kept, matched in ((23, 22, 1), (23, 22, 1), (21, 21, 0), (5, 5, 0)):
        r.finish(output[:num_left])
        assert (counts.kept_tokens, counts.matched_tokens) == (kept, matched)
        assert counts.kept_tokens + counts.written_tokens == num_left


def test_judging_alone_keeps_nothing_in_the_output():
    """Red if parse_verify counts tokens that were never emitted."""
    r = report()
    r.record(
        RoundRecord(
            output_len=0,
            accept_tokens=(),
            draft_tokens=[1, 2, 3],
            num_client=3,
            boundaries=[1, 3],
            scores=[0.9, 0.2],
            num_judged=1,
            num_passes=2,
        )
    )
    result = as_dict(r, [9])
    assert result["target_passes"] == 2
    assert result["kept_tokens"] == 0
    spans = [(s["outcome"], s["start"], s["text"]) for s in result["segments"]]
    assert spans == [("kept", 0, "<1>"), ("rejected", 1, "<2><3>")]


def test_segments_are_kept_only_on_request():
    """Red if every request carries its segments through the scheduler."""
    r = report(want_segments=False)
    first_failure_round(r)
    assert r.trail.spans == []
    assert "segments" not in as_dict(r, FIRST)


@pytest.mark.parametrize("fallback", ["", "logprobs"])
def test_as_dict_is_json_and_names_the_fallback(fallback):
    """Red if meta_info cannot be serialised or an empty fallback is shown."""
    r = report(fallback=fallback)
    first_failure_round(r)
    result = json.loads(json.dumps(as_dict(r, FIRST)))
    assert result["mode"] == "semantic"
    assert result.get("fallback", "") == fallback
    assert ("fallback" in result) == bool(fallback)


BYTES = [bytes([b]) for b in "é你😀 ß".encode()]
PIECES = ["▁", "▁", "▁a", "b", "▁the", ".", "<0x0A>", "好"]
FALLBACK = [*PIECES, *(f"<0x{b:02X}>" for b in "你😀".encode())]
INVISIBLE = -1  # a special token, which decoding leaves out
SENTENCEPIECE = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
METASPACE = decoders.Metaspace()

Decode = Callable[[list[int]], str]


def decode_bytes(ids: list[int]) -> str:
    """Byte-level BPE: tokens are parts of characters, words and valid characters."""
    vocab = [*BYTES, b"\xff", b"a", b" the", "é".encode(), "x你".encode()]
    tokens = [vocab[i % len(vocab)] for i in ids if i != INVISIBLE]
    return b"".join(tokens).decode("utf-8", "replace")


def decode_metaspace(ids: list[int]) -> str:
    """The first token that is shown loses its leading space."""
    return METASPACE.decode([PIECES[i % len(PIECES)] for i in ids if i != INVISIBLE])


def decode_fallback(ids: list[int]) -> str:
    """The same; bytes in a row are a text or, if one is missing, one part each."""
    tokens = [FALLBACK[i % len(FALLBACK)] for i in ids if i != INVISIBLE]
    return SENTENCEPIECE.decode(tokens)


def random_report(rng: random.Random) -> tuple[RequestReport, list[int]]:
    """Rounds with kept, rejected and written tokens, cut in the end."""
    r, output = report(), []
    share = rng.choice([0, 0.2, 0.9])

    def tokens(num: int) -> list[int]:
        return [
            INVISIBLE if rng.random() < share else rng.randrange(1000)
            for _ in range(num)
        ]

    for _ in range(rng.randrange(1, 60)):
        draft = tokens(rng.randrange(7))
        kept = rng.randint(0, len(draft))
        ends = sorted({kept, len(draft)} - {0})
        accepted = [*draft[:kept], *tokens(1)]
        r.record(
            RoundRecord(
                len(output), accepted, draft, num_client=min(1, len(draft)),
                boundaries=ends, scores=[0.5] * len(ends), num_judged=kept,
            )
        )  # fmt: skip
        output += accepted
    output = output[: len(output) - rng.choice([0, 0, 5])]
    r.finish(output)
    return r, output


@pytest.mark.parametrize("decode", [decode_bytes, decode_metaspace, decode_fallback])
def test_texts_are_those_of_the_whole_output_decoded(decode: Decode):
    """Red if a text depends on how many tokens before it are decoded with it: a lost
    space or character, or one too many. A character that two segments share stands in
    the first."""
    rng = random.Random(0)
    for _ in range(200):
        r, output = random_report(rng)
        whole, spelt = decode(output), ""
        for s in r.as_dict(output, decode)["segments"]:
            before = decode(output[: s["start"]])
            behind = decode([*output[: s["start"]], *s["token_ids"]])
            is_rejected = s["outcome"] == "rejected"
            if not is_rejected:
                assert s["text_start"] == len(spelt)
                spelt += s["text"]
            if decode is decode_fallback and (
                before.endswith(PART) or not whole.startswith(before)
            ):
                continue  # bytes that the output shows with others as one character
            assert s["text_start"] == len(before)
            if is_rejected or (not behind.endswith(PART) and whole.startswith(behind)):
                assert s["text"] == behind[len(before) :]
        assert spelt == whole


def test_a_character_in_two_segments_stands_in_the_first():
    """Red if segments spell a part of a character that the output has whole."""
    r = report()
    r.record(RoundRecord(0, [13, 0, 1, 13], [13, 0], num_matched=2))
    spans = as_text(r, [13, 0, 1, 13], decode_bytes)
    assert spans == [("aé", 0), ("a", 2)]


def as_text(r: RequestReport, output: list[int], decode: Decode) -> list:
    r.finish(output)
    spans = r.as_dict(output, decode)["segments"]
    return [(s["text"], s["text_start"]) for s in spans]


@pytest.mark.parametrize("num_hidden", [0, CONTEXT, 40 * CONTEXT])
def test_a_space_behind_hidden_tokens_is_kept(num_hidden):
    """Red if a run of special tokens leaves nothing to decode a space behind."""
    r, output = report(), [2, *[INVISIBLE] * num_hidden, 2, 2]
    for i, token in enumerate(output):
        kept = i % 2
        r.record(RoundRecord(i, [token], [token] * kept, num_matched=kept))
    texts = [text for text, _ in as_text(r, output, decode_metaspace)]
    assert "".join(texts) == "a a a" and texts[-1] == " a"


class Meter:
    """Counts the tokens that are decoded."""

    num_tokens = 0

    def __init__(self, decode: Decode) -> None:
        self.decode = decode

    def __call__(self, ids: list[int]) -> str:
        self.num_tokens += len(ids)
        return self.decode(ids)


@pytest.mark.parametrize(
    "decode",
    [
        lambda ids: "x" * len(ids),
        lambda ids: "",
        lambda ids: PART * len(ids),
        lambda ids: PART if ids else "",
    ],
    ids=["text", "hidden", "parts", "one part"],
)
def test_decoding_is_linear_in_the_output(decode: Decode):
    """Red if the texts of a long report decode prefix after prefix: the scheduler
    stands still meanwhile."""

    def num_decoded(num_rounds: int) -> int:
        r, meter = report(), Meter(decode)
        for i in range(num_rounds):
            r.record(
                RoundRecord(
                    2 * i, [1, 9], [1, 2, 3], boundaries=[1, 3],
                    scores=[0.9, 0.1], num_judged=1,
                )
            )  # fmt: skip
        as_text(r, [1, 9] * num_rounds, meter)
        return meter.num_tokens

    assert num_decoded(2000) < 5 * num_decoded(500)
    assert num_decoded(2000) < 4000 * 1000
