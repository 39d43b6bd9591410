"""Texts that come with a request: judged drafts and parse_verify, on real servers."""

import pytest
import requests

from benchmarks.embedded_answers import render_answer, render_step, split_segments
from sglang_parse.embedded.task import make_problems
from tests.support.client import CHUNK, chat_ids, outcome, report

NO_TAIL = {"parse_exact_tail": False, "parse_report": True}


@pytest.fixture(scope="module")
def problems():
    return make_problems(8, seed=4040)


@pytest.fixture(scope="module")
def asked(problems, tokenizer):
    return [chat_ids(tokenizer, p.prompt) for p in problems]


def with_error(problem, step: int) -> str:
    """The draft's way of putting it, wrong in one step."""
    lines = [
        render_step(problem, i, "B1", **({"total": total} if i == step else {}))
        for i, total in enumerate([(t + 3) % 21 for t in problem.totals[1:]], 1)
    ]
    return "".join(lines)


def test_right_draft_is_the_output(parse, problems, asked):
    """Red if a right draft in another phrasing is not kept from its first token."""
    cases = [
        (ids, {"custom": {"parse_draft": render_answer(p, "B"), **NO_TAIL}})
        for p, ids in zip(problems, asked, strict=True)
    ]
    results = parse.run_all(cases, 6)
    exact = [
        r["text"] == render_answer(p, "B")
        for p, r in zip(problems, results, strict=True)
    ]
    # The judge is a model: it may reject a right line now and then.
    assert sum(exact) >= len(problems) - 2
    for result in results:
        entry = report(result)
        assert result["meta_info"]["completion_tokens"] == (
            entry["kept_tokens"] + entry["written_tokens"]
        )


def test_draft_then_the_servers_own_draft_model(parse, problems, asked):
    """Red if the server does not go on by itself behind a partial draft."""
    draft = render_step(problems[0], 1, "B1") + render_step(problems[0], 2, "B2")
    entry = report(parse.generate(asked[0], custom={"parse_draft": draft, **NO_TAIL}))
    assert entry["kept_client_tokens"] == entry["client_text_tokens"]
    assert entry["draft_tokens"] > 0
    assert {s["origin"] for s in entry["segments"]} >= {"client", "draft", "target"}


def test_draft_that_is_cut_by_max_new_tokens(parse, problems, asked):
    """Red if a judged draft overruns the length asked for."""
    draft = render_answer(problems[0], "B")
    for limit in (1, 2, 3, 13, 14, 40):
        result = parse.generate(
            asked[0], custom={"parse_draft": draft, **NO_TAIL}, max_new_tokens=limit
        )
        assert len(result["output_ids"]) == limit
        entry = report(result)
        assert entry["kept_tokens"] + entry["written_tokens"] == limit


def test_stop_string_inside_a_judged_draft(parse, problems, asked):
    """Red if text behind a stop string is sent because it was judged with the rest."""
    draft = render_answer(problems[0], "B")
    result = parse.generate(
        asked[0], custom={"parse_draft": draft, **NO_TAIL}, stop=["Step 3"]
    )
    assert result["text"] == draft[: draft.index("Step 3")]
    kept = [s for s in report(result)["segments"] if s["outcome"] != "rejected"]
    assert "".join(s["text"] for s in kept).startswith(result["text"])


def test_streamed_draft_arrives_once(parse, problems, asked):
    """Red if tokens decided ahead of the first are lost or doubled in a stream."""
    draft = render_answer(problems[1], "B")
    custom = {"parse_draft": draft, **NO_TAIL}
    *_, last = parse.stream(asked[1], custom=custom)
    assert last["text"] == parse.generate(asked[1], custom=custom)["text"]


def test_nothing_behind_an_end_of_text_stays_in_a_session(parse, problems, asked):
    """Red if the next turn reads what a client's text has behind its end-of-text."""
    found = []
    for behind in ("", "And 7 apples more.\nSo the answer is 7.\n"):
        session = parse.post("/open_session", {"capacity_of_str_len": 9999}).json()
        text = f"{render_answer(problems[0], 'B')}<|im_end|>{behind}"
        custom = {"parse_draft": text, **NO_TAIL}
        answers, rid = [], None
        for turn in (asked[0], asked[1]):
            top = {"session_params": {"id": session, "rid": rid}}
            answers.append(parse.generate(turn, top=top, custom=custom))
            rid, custom = answers[-1]["meta_info"]["id"], {"parse_mode": "exact"}
        parse.post("/close_session", {"session_id": session})
        found.append(answers)
    (first, second), (first_behind, second_behind) = found
    assert first["text"].startswith(render_answer(problems[0], "B").strip())
    assert outcome(first_behind) == outcome(first)
    assert outcome(second_behind) == outcome(second)
    known = [one["meta_info"]["prompt_tokens"] for one in (second, second_behind)]
    assert known[0] == known[1] > len(asked[0]) + len(asked[1])


def test_draft_behind_a_chunked_prompt(parse, problems, asked):
    """Red if a draft is judged before its whole prompt is there."""
    draft = render_answer(problems[0], "B")
    custom = {"parse_draft": draft, "parse_threshold": 0.0, **NO_TAIL}
    long_prompt = asked[0] * 6
    assert len(long_prompt) > CHUNK
    results = parse.generate_all(
        [long_prompt, *asked[:3], long_prompt], 5, custom=custom
    )
    assert all(r["text"].startswith(draft) for r in results)


def test_verify_of_sixteen_prefixes_shares_passes(parse, problems, asked):
    """Red if prefixes are judged one after another, or differ from judging one. Their
    rows are two prefills of this server, and a pass has no more than one."""
    problem, ids = problems[2], asked[2]
    words = render_answer(problem, "B").split(" ")
    size = -(-len(words) // 16)
    parts = [" ".join(words[k : k + size]) for k in range(0, len(words), size)]
    parts = [part if k == 0 else " " + part for k, part in enumerate(parts)]
    entry = report(
        parse.generate(ids, custom={"parse_verify": parts}, max_new_tokens=1)
    )
    assert entry["mode"] == "verify"
    assert entry["target_passes"] == 2
    assert entry["judged_segments"] == len(parts) >= 14
    assert "".join(s["text"] for s in entry["segments"]) == "".join(parts)
    for k in (1, 5, len(parts)):
        one = report(
            parse.generate(
                ids, custom={"parse_verify": ["".join(parts[:k])]}, max_new_tokens=1
            )
        )
        got = one["segments"][0]["score"]
        assert got == pytest.approx(entry["segments"][k - 1]["score"], abs=1e-3)


def test_verify_leaves_nothing_in_the_cache(parse, asked):
    """Red if judged text or suffixes stay in the radix cache or leak slots."""
    before = parse.generate(asked[3], max_new_tokens=40)
    parse.generate(
        asked[3], custom={"parse_verify": "Step 1: no.\n" * 9}, max_new_tokens=1
    )
    assert parse.is_alive()
    assert outcome(parse.generate(asked[3], max_new_tokens=40)) == outcome(before)


def test_verify_of_what_does_not_fit_is_refused(parse, asked):
    """Red if a text beyond the context is cut silently, or stops the server."""
    text = "Step 1: it was 3, plus 4 makes 7.\n" * 2000
    body = parse.body(asked[0], custom={"parse_verify": text}, max_new_tokens=1)
    reply = parse.post("/generate", body)
    assert reply.status_code == 400
    assert "parse_verify" in reply.text and "room" in reply.text
    assert parse.is_alive()


def test_drafts_in_one_batch_with_others(parse, target, problems, asked):
    """Red if a judged draft disturbs requests that are prefilled or decoded with it."""
    cases = []
    for k, (problem, ids) in enumerate(zip(problems, asked, strict=True)):
        custom = [
            {"parse_draft": render_answer(problem, "B"), "parse_exact_tail": False},
            {"parse_mode": "exact"},
            {"parse_prediction": render_answer(problem, "B")},
        ][k % 3]
        cases.append((ids, {"custom": custom}))
    together = parse.run_all(cases, 12)
    for k, (case, result) in enumerate(zip(cases, together, strict=True)):
        if k % 3:
            assert outcome(result) == outcome(target.generate(case[0]))
        else:
            assert outcome(result) == outcome(parse.generate(case[0], **case[1]))


# -- A server without a draft model ----------


@pytest.mark.parametrize("field", ["parse_draft", "parse_prediction"])
@pytest.mark.parametrize("server", ["parse", "no-draft"])
def test_grammar_holds_along_a_text_that_breaks_it(
    pool, target, prompts, server, field
):
    """Red if a client's text is drafted past where the grammar ends it, which stopped
    the scheduler once."""
    sampling = {"regex": r"Step [1-9]: [a-z ,]{5,40}\.", "max_new_tokens": 60}
    expected = target.generate(prompts[0], **sampling)
    whole = expected["text"]
    parse = pool.get(server)
    for text in (
        whole,
        whole[: len(whole) // 2] + "\nAnswer: 7",
        whole + " And then some more.",
        "Answer: 7",
    ):
        result = parse.generate(prompts[0], custom={field: text}, **sampling)
        assert outcome(result) == outcome(expected)
        assert report(result)["mode"] == "exact"
    kept = parse.generate(prompts[0], custom={field: whole}, **sampling)
    assert report(kept)["kept_client_tokens"] > 5


@pytest.mark.own_server
def test_server_without_a_draft_model(pool, problems, asked):
    """Red if predictions need a draft model, or /metrics does not add up."""
    target = pool.get("target")
    alone = [outcome(r) for r in target.generate_all(asked[:4], 4)]
    server = pool.get("no-draft")
    plain = server.generate_all(asked[:4], 4)
    assert [outcome(r) for r in plain] == alone
    assert {report(r)["fallback"] for r in plain} == {"no_draft_model"}
    passes = 0
    for ids, (tokens, text, finish) in zip(asked, alone, strict=False):
        result = server.generate(ids, custom={"parse_prediction": text})
        assert outcome(result) == (tokens, text, finish)
        passes = report(result)["target_passes"]
        assert 3 * passes <= len(tokens)
    draft = render_answer(problems[0], "B")
    result = server.generate(asked[0], custom={"parse_draft": draft})
    assert result["text"].startswith(split_segments(draft)[0])
    text = requests.get(server.url + "/metrics", timeout=60).text
    values = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if "sglang:parse_" in line
    )

    def value(name: str) -> float:
        return sum(float(v) for k, v in values.items() if k.startswith(name))

    assert value("sglang:parse_requests_total") >= 9
    assert value("sglang:parse_verdict_score_count") == value(
        "sglang:parse_segments_total"
    )
    assert value("sglang:parse_client_tokens_total") > 0
    assert value("sglang:parse_drafted_total") == 0


@pytest.mark.parametrize("option", ["parse_verify", "parse_draft"])
def test_a_cached_prompt_is_judged_like_a_new_one(parse, problems, asked, option):
    """Red if the pass relies on the prefill forward that a cached prompt goes without,
    or leaves the prompt's last token without KV."""
    text = with_error(problems[3], 3)
    custom = {option: text, "parse_report": True}
    sampling = {"max_new_tokens": 1} if option == "parse_verify" else {}
    parse.flush()
    cold = parse.generate(asked[3], custom=custom, **sampling)
    warm = parse.generate(asked[3], custom=custom, **sampling)
    assert warm["meta_info"]["cached_tokens"] == len(asked[3]) - 1
    assert outcome(warm)[2] == outcome(cold)[2]
    scores = [[s["score"] for s in report(r)["segments"]] for r in (cold, warm)]
    assert len(scores[0]) == len(scores[1]) > 2
    for a, b in zip(*scores, strict=True):
        assert (a is None) == (b is None)
        assert a is None or a == pytest.approx(b, abs=1e-3)
    if option == "parse_draft":
        assert outcome(warm) == outcome(cold)
