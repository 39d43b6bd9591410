"""What rollouts of reinforcement learning ask of a server: ids instead of text
(--skip-tokenizer-init), and new weights in the middle of answers."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from sglang_parse.embedded.task import make_problems
from tests.support.client import chat_ids, finish, report
from tests.support.trainer import Trainer, post, send_tensors

pytestmark = pytest.mark.own_server
EXACT, OFF = {"parse_mode": "exact"}, {"parse_mode": "off"}
LENGTH = 120
LONG = {"ignore_eos": True, "max_new_tokens": LENGTH}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2}
SEGMENTERS = ("fixed:7", "line", "sentence", "paragraph", "step", "code")


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [chat_ids(tokenizer, p.prompt) for p in make_problems(6, seed=556)]


@pytest.fixture(scope="module")
def asked(prompts):
    """Prompts with options; the first half in exact mode."""
    exact = [(p, {"custom": EXACT, "top": LOGPROBS}) for p in prompts]
    judged = [
        (p, {"custom": {"parse_segmenter": name, "parse_report": True}})
        for p, name in zip(prompts, SEGMENTERS, strict=True)
    ]
    return exact + judged


def test_ids_are_served_as_text_is(pool, prompts, asked):
    """Red if answers in ids, their logprobs or their segments differ where the server
    loads no tokenizer for requests, or if segments or verdicts are lost."""
    own = pool.get("target").generate_all(prompts, 3, top=LOGPROBS)
    texts = pool.get("parse").run_all(asked, 3)
    server = pool.get("ids")
    found = server.run_all(asked, 3)
    num = len(prompts)
    for one, expected in zip(found[:num], own, strict=True):
        assert "text" not in one
        assert one["output_ids"] == expected["output_ids"]
        assert finish(one) == finish(expected)
        for name in ("output_token_logprobs", "output_top_logprobs"):
            theirs = ids_and_logprobs(expected["meta_info"][name])
            assert ids_and_logprobs(one["meta_info"][name]) == theirs
    assert sum(report(one)["kept_tokens"] for one in found[:num]) > 0
    for one, expected in zip(found[num:], texts[num:], strict=True):
        assert one["output_ids"] == expected["output_ids"]
        mine, theirs = (report(each)["segments"] for each in (one, expected))
        scores = [[part.pop("score") for part in parts] for parts in (mine, theirs)]
        assert [{**part, "text": "", "text_start": 0} for part in theirs] == mine
        assert any(score is not None for score in scores[0])
        for score, their in zip(*scores, strict=True):
            assert score == (their if their is None else pytest.approx(their, abs=1e-4))
    drafted = server.generate(
        prompts[0], custom={"parse_draft": "Step 1: abc\n", "parse_threshold": 0}
    )
    assert report(drafted)["accepted_client_text_tokens"] > 0


@pytest.mark.parametrize(
    ("prompt", "sampling"), [("Hello", {}), ([5], {"stop": ["x"]})]
)
def test_what_needs_text_is_refused(pool, prompt, sampling):
    """Red if a request that a server without texts cannot serve ends it, or is answered
    with another status than HTTP 400."""
    server = pool.get("ids")
    reply = server.post("/generate", server.body(prompt, **sampling))
    assert reply.status_code == 400 and "skip_tokenizer_init=True" in reply.text
    assert server.is_alive()


def ids_and_logprobs(entries):
    """Without the texts of tokens."""
    if isinstance(entries[0], float):
        return [pytest.approx(entries[0], abs=1e-4), entries[1]]
    return [ids_and_logprobs(one) for one in entries]


# -- New weights ----------


@pytest.fixture(scope="module")
def other_target():
    """The target's weights, and others, with which it answers otherwise."""
    own = load_file(TARGET_PATH / "model.safetensors")
    name = "model.layers.3.mlp.down_proj.weight"
    noise = torch.randn(own[name].shape, generator=torch.Generator().manual_seed(1))
    return {name: own[name]}, {name: own[name] + noise * own[name].std()}


def test_answers_go_on_with_new_weights(pool, prompts, other_target):
    """Red if an answer whose weights change in the middle has a token that neither the
    old target nor the new one would have written there, or if `weight_versions` names
    another place of the change, or if the draft model takes the target's weights."""
    own, others = other_target
    server = pool.get("ids")
    long = {"custom": EXACT, **LONG}
    before = server.generate_all(prompts, len(prompts), **long)
    with ThreadPoolExecutor(len(prompts)) as threads:
        running = [threads.submit(server.generate, p, **long) for p in prompts]
        time.sleep(0.4)
        post(server, "/pause_generation", mode="retract")
        send_tensors(server, others, weight_version="second")
        post(server, "/continue_generation")
        done = [one.result() for one in running]
    found = [(one["output_ids"], one["meta_info"]) for one in done]
    num_changed = 0
    for prompt, (ids, meta), first in zip(prompts, found, before, strict=True):
        *old, new = meta["weight_versions"]
        assert new["version"] == meta["weight_version"] == "second"
        num = old[0]["end"] if old else 0
        assert ids[:num] == first["output_ids"][:num]
        rest = {**LONG, "max_new_tokens": LENGTH - num}
        assert (
            ids[num:]
            == server.generate([*prompt, *ids[:num]], custom=OFF, **rest)["output_ids"]
        )
        num_changed += 0 < num < LENGTH
    assert num_changed > 0
    assert [ids for ids, _ in found] != [one["output_ids"] for one in before]
    send_tensors(server, own, weight_version="default")
    again = server.generate_all(prompts, 3, **long)
    assert [one["output_ids"] for one in again] == [one["output_ids"] for one in before]


def test_the_draft_can_be_given_weights_of_its_own(pool, prompts):
    """Red if an update that names the draft does not reach it or reaches the target, or
    if a report does not show that a draft has become useless."""
    server, prompts = pool.get("ids"), prompts[:3]
    custom = {**EXACT, "parse_window": 8}
    before = server.generate_all(prompts, 3, custom=custom)
    own = load_file(DRAFT_PATH / "model.safetensors")
    trainer = Trainer(server)
    shares = []
    for weights in ({k: torch.zeros_like(v) for k, v in own.items()}, own):
        trainer.send(weights, "draft")
        found = server.generate_all(prompts, 3, custom=custom)
        ids = [one["output_ids"] for one in found]
        assert ids == [one["output_ids"] for one in before]
        shares.append(share_kept(found))
    assert shares[0] < 0.1
    assert shares[1] == pytest.approx(share_kept(before), abs=0.1)


def share_kept(results):
    """Of what the draft model wrote."""
    told = [report(one) for one in results]
    drafted = sum(one["drafted_by"].get("model", 0) for one in told)
    return sum(one["kept_by"].get("model", 0) for one in told) / max(1, drafted)
