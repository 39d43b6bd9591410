"""The families of models that are served, by tiny ones of the real architectures.

Each engine is a real scheduler of SGLang (tests/support/tiny_engine.py). Two witnesses
speak for every answer: the same engine in mode `off`, which decodes as the target
alone, and Hugging Face's own code, which reads prompt and answer in one forward.
"""

import os

import pytest
import torch
from transformers import AutoTokenizer

from sglang_parse.embedded import TARGET_PATH
from sglang_parse.judging.prompt import build_judge_prompt
from sglang_parse.options.table import DEFAULT_JUDGE_SUFFIX
from tests.integration.test_scores import judged_prefixes
from tests.support import tiny_models
from tests.support.plain_models import PLAIN
from tests.support.sparse_models import SPARSE
from tests.support.tiny_engine import TinyEngine
from tests.support.tiny_models import WINDOW

FAMILIES = tiny_models.FAMILIES | PLAIN | SPARSE

# More than three windows each.
PROMPT_TOKENS = 3 * WINDOW + 4
ANSWER_TOKENS = 3 * WINDOW + 4
IS_LONG = bool(os.environ.get("SGLANG_PARSE_TEST_SCALE"))
NUM_PROMPTS = 40 if IS_LONG else 12
# Of logits: two that are nearer may be told apart either way by another code.
SAME_LOGIT = 1e-3
SAME_SCORE = 1e-4
FLAGS = (
    "--sleep-on-idle",  # the next family's engine starts beside the one that serves
    *("--speculative-algorithm", "PARSE", "--no-speculative-parse-adaptive"),
    *("--speculative-parse-client-options", "all"),
    *("--speculative-parse-segmenter", "fixed:4", "--chunked-prefill-size", "24"),
    *("--max-total-tokens", "2048", "--max-running-requests", "8"),
)
# Of each family's prompts, so many get drafts of a whole window; the others' are short,
# which is all that keeps the suite within minutes.
NUM_LONG_DRAFTS = 8
SHORT_DRAFTS = {"parse_mode": "exact", "parse_window": 8}
# Served by two ranks, each of which has half of the experts. Each of their forwards
# waits for the other a dozen times.
ON_TWO_RANKS = {"qwen3_moe"} if IS_LONG else set()
TWO_RANKS = ("--tp-size", "2", "--ep-size", "2")
WITH_IMAGES = ("qwen3_vl",)
# With SGLANG_PARSE_TEST_SCALE=1 alone. Those that always run have latent attention,
# windows with sinks and with capped logits, an index, positions in three parts and
# experts.
RARELY = {
    *("deepseek_v2", "gemma3", "gemma3_images", "glm4_moe", "glm_moe_dsa", "mimo_v2"),
    *("mistral3", "qwen2", "qwen2_5_vl", "qwen2_vl", "qwen3", "qwen3_moe"),
    *("qwen3_vl_moe", *PLAIN),
}
ON_REQUEST = set() if IS_LONG else RARELY
CASES = sorted(set(FAMILIES) - ON_REQUEST)
JUDGED = [name for name in CASES if name not in SPARSE]
# SGLang takes a request back every so many rounds; its state has to be made again.
INTERVAL = "23" if IS_LONG else "11"
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": INTERVAL}


class Served:
    """A family's engine, and Hugging Face's model of the same weights."""

    def __init__(
        self,
        name: str,
        folder,
        *more_flags: str,
        wait: bool = True,
    ):
        self.name = name
        family = FAMILIES[name]
        target, draft = folder / "target", folder / "draft"
        family.build(target)
        family.build_draft(draft)
        self.witness = family.model_of()
        self.witness.set_attn_implementation("eager")
        self.engine = TinyEngine(
            [
                *("--model-path", str(target), *FLAGS, *family.flags, *more_flags),
                *("--speculative-draft-model-path", str(draft)),
                *(["--trust-remote-code"] if family.has_code else []),
                *(TWO_RANKS if name in ON_TWO_RANKS else ()),
            ],
            num_ranks=2 if name in ON_TWO_RANKS else 1,
            log=str(folder / "engine.log"),
            environment=RETRACT | family.environment,
            wait=wait,
        )

    def prompts(self, num, seed=3):
        return prompts_of(num, seed, PROMPT_TOKENS + FAMILIES[self.name].longer)

    def logits(self, prompt, ids, image=None):
        """[len(ids) + 1, vocab] of the witness, from behind the prompt on. image: the
        ImagePrompt of the prompt, where it has one."""
        more = image.witness_inputs(len(ids)) if image else {}
        with torch.no_grad():
            logits = self.witness(torch.tensor([[*prompt, *ids]]), **more).logits[0]
        return logits[len(prompt) - 1 :]

    def check_greedy(self, prompt, ids, image=None) -> None:
        """The witness would have written the same."""
        logits = self.logits(prompt, ids, image)[: len(ids)]
        chosen = logits[torch.arange(len(ids)), torch.tensor(ids)]
        assert float((logits.max(-1).values - chosen).max()) < SAME_LOGIT


@pytest.fixture(scope="module")
def started():
    """Engines of families whose turn is next, by name. Those on two ranks take both
    cores and are alone."""
    engines: dict[str, Served] = {}
    yield engines
    for one in engines.values():
        one.engine.close()


@pytest.fixture(scope="module", params=CASES)
def served(request, tmp_path_factory, started):
    def start(name):
        return Served(name, tmp_path_factory.mktemp(name), wait=False)

    name = request.param
    one = started.pop(name, None) or start(name)
    one.engine.wait()
    ours = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in ours if hasattr(item, "callspec")]
    asked = list(dict.fromkeys(p["served"] for p in params if "served" in p))
    later = asked[asked.index(name) + 1 :][:1]
    if not ON_TWO_RANKS.intersection((name, *later)):
        started |= {next_one: start(next_one) for next_one in later}
    yield one
    one.engine.close()


def prompts_of(num: int, seed: int = 3, length: int = PROMPT_TOKENS):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, 580, (length + i % 7,), generator=generator).tolist()
        for i in range(num)
    ]


def ids_of(answers):
    return [a.ids for a in answers]


def test_exact_mode_writes_what_the_target_alone_writes(served):
    """Red if any row of a pass sees another column, position, slot or state: answers of
    many prompts, one and eight at a time. Drafts agree often, and not always."""
    engine, prompts = served.engine, served.prompts(NUM_PROMPTS)
    length = {"max_new_tokens": ANSWER_TOKENS}
    alone = engine.run(prompts, 8, custom={"parse_mode": "off"}, **length)
    assert all(len(a.ids) == ANSWER_TOKENS for a in alone)
    assert all(a.report["mode"] == "off" for a in alone)
    long, short = prompts[:NUM_LONG_DRAFTS], prompts[NUM_LONG_DRAFTS:]
    exact = engine.run(long, 8, custom={"parse_mode": "exact"}, **length)
    kept = sum(a.report["kept_tokens"] for a in exact) / len(exact)
    exact += engine.run(short, 8, custom=SHORT_DRAFTS, **length)
    assert ids_of(exact) == ids_of(alone)
    assert all(a.report["mode"] == "exact" for a in exact)
    for prompt, answer in list(zip(prompts, alone, strict=True))[::5]:
        served.check_greedy(prompt, answer.ids)

    one = engine.run(long[:4], 1, custom={"parse_mode": "exact"}, **length)
    one += engine.run([*long[4:], *short], 1, custom=SHORT_DRAFTS, **length)
    assert ids_of(one[:8]) == ids_of(alone[:8])
    for prompt, mine, theirs in zip(prompts, one, alone, strict=False):
        if mine.ids != theirs.ids:  # eight at a time, logits differ in their last bits
            served.check_greedy(prompt, mine.ids)
    assert sum(a.retractions for a in [*alone, *exact]) > 0
    # Requests that are taken back lose drafts, and which are is a matter of time.
    assert kept > ANSWER_TOKENS / 8  # or whole windows are never kept


def test_a_hostile_draft_changes_no_token(served):
    """Red if what a refused row wrote is read later."""
    engine, prompts = served.engine, served.prompts(4, seed=17)
    length = {"max_new_tokens": ANSWER_TOKENS}
    alone = engine.run(prompts, 4, custom={"parse_mode": "off"}, **length)
    hostile = {"parse_mode": "exact", "parse_draft": "I know 7 other words. " * 6}
    answers = engine.run(prompts, 4, custom=hostile, **length)
    assert ids_of(answers) == ids_of(alone)
    assert all(a.report["draft_tokens"] > 4 for a in answers)


@pytest.mark.parametrize("served", JUDGED, indirect=True)
def test_scores_equal_one_prefill_a_prefix(served):
    """Red if a suffix sees more or less than its prefix and itself."""
    prompts, length = served.prompts(6, seed=5), 2 * ANSWER_TOKENS
    custom = {"parse_mode": "semantic", "parse_threshold": 0.0, "parse_window": 24}
    custom |= {"parse_report": True}
    answers = served.engine.run(prompts, 6, custom=custom, max_new_tokens=length)
    tokenizer = AutoTokenizer.from_pretrained(TARGET_PATH)
    judge = build_judge_prompt(tokenizer, DEFAULT_JUDGE_SUFFIX, (("Yes", "No"),))
    ((yes, no),) = judge.verdict_ids
    num = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        result = {"output_ids": answer.ids, "meta_info": {"parse": [answer.report]}}
        prefixes = judged_prefixes(result)
        assert prefixes
        for prefix, score in prefixes[::3]:
            ids = [*prefix, *judge.suffix]
            last = served.logits(prompt, ids)[len(ids)]
            alone = float(torch.sigmoid(last[yes] - last[no]))
            assert score == pytest.approx(alone, abs=SAME_SCORE)
            num += 1
    assert num >= 12


def test_cached_prefixes_are_read_right(served):
    """Red if radix reuse gives a row a slot that a window has lost."""
    engine = served.engine
    (prompt,) = served.prompts(1, seed=11)
    exact = {"custom": {"parse_mode": "exact"}, "max_new_tokens": ANSWER_TOKENS}
    engine.flush()
    first = engine.run([prompt], **exact)[0]
    again = engine.run([prompt], **exact)[0]
    longer = [*prompt, *first.ids, 7, 8, 9]
    behind = engine.run([longer], **exact)[0]
    assert first.cached == 0
    assert again.cached >= PROMPT_TOKENS - WINDOW - 2 or again.cached == 0
    assert again.ids == first.ids
    served.check_greedy(longer, behind.ids)


def test_aborted_requests_leave_nothing_behind(served):
    """Red if slots or states of requests that end inside a round are lost, which SGLang
    finds when it is idle, or are others' too early."""
    engine, prompts = served.engine, served.prompts(6, seed=13)
    exact = {"custom": {"parse_mode": "exact"}, "max_new_tokens": ANSWER_TOKENS}
    expected = engine.run(prompts[:2], 2, **exact)
    ended = engine.run(prompts, 6, abort_after=4, stream=True, **exact)
    assert any(a.reason["type"] == "abort" for a in ended)
    for answer, whole in zip(ended, expected, strict=False):
        assert answer.ids == whole.ids[: len(answer.ids)]
    assert ids_of(engine.run(prompts[:2], 2, **exact)) == ids_of(expected)
    engine.flush()


@pytest.mark.parametrize("served", [c for c in CASES if c in SPARSE], indirect=True)
def test_what_an_index_selects_is_judged_by_nobody(served):
    """Red if a request that asks for verdicts gets other tokens than the target's, or
    a report that does not say why, or a text to judge gets an answer."""
    engine, prompts = served.engine, served.prompts(4, seed=5)
    length = {"max_new_tokens": ANSWER_TOKENS}
    alone = engine.run(prompts, 4, custom={"parse_mode": "off"}, **length)
    asked = engine.run(prompts, 4, custom={"parse_mode": "semantic"}, **length)
    assert ids_of(asked) == ids_of(alone)
    told = {(a.report["mode"], a.report["fallback"]) for a in asked}
    assert told == {("exact", "sparse_attention")}
    assert sum(a.report["judged_segments"] for a in asked) == 0
    text = {"parse_verify": "One and one is 2.\n"}
    (refused,) = engine.run(prompts[:1], custom=text, max_new_tokens=1)
    assert refused.reason["type"] == "abort" and refused.reason["status_code"] == 400
    assert "sparse attention" in refused.reason["message"]


@pytest.mark.parametrize("served", WITH_IMAGES, indirect=True)
def test_prompts_with_images(served):
    """Red if a row behind an image gets another position, a draft trips over what
    stands for the image, or rounds of requests without images suffer. Servers refuse
    images before they come so far."""
    from tests.support.tiny_images import ImagePrompt, before_images

    model_type = served.witness.config.model_type
    images = [
        ImagePrompt(prompt, model_type, height=2 * (1 + i % 3), width=4, seed=i)
        for i, prompt in enumerate(prompts_of(8, seed=7))
    ]
    plain = prompts_of(4, seed=8)
    prompts = [*(one.ids for one in images), *plain]

    def answers(concurrency, mode):
        each = [{"mm": one.mm_inputs()} for one in images] + [{} for _ in plain]
        length = {"max_new_tokens": ANSWER_TOKENS, "each": each}
        custom = {"parse_mode": mode}
        return served.engine.run(prompts, concurrency, custom=custom, **length)

    alone, exact, asked = answers(4, "off"), answers(6, "exact"), answers(6, "semantic")
    assert ids_of(exact) == ids_of(alone)
    assert ids_of(answers(1, "exact")) == ids_of(alone)
    for one, answer, other in zip(images, alone, asked, strict=False):
        served.check_greedy(one.ids, before_images(answer.ids), one)
        assert answer.ids == other.ids
        told = other.report["mode"], other.report["fallback"]
        assert told == ("exact", "multimodal_input")
    assert all(a.report["mode"] == "semantic" for a in asked[8:])
