"""Judging without a PARSE server: every prefix is an ordinary request.

The context with the whole text is prefilled once; then each prefix with the judge's
question is a request of its own, which shares that prefix in the radix cache and is
scored by the log-probabilities of the verdict tokens. Same tokens, same question and
same scores as PARSE's one pass, which this is the baseline of.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglSamplingParams

from sglang_parse.frontend.adapter import KEY, Answer, ParseSamplingParams
from sglang_parse.judging.decide import count_valid_segments
from sglang_parse.judging.prompt import JudgePrompt, build_judge_prompt
from sglang_parse.judging.segmenter import Segmenter, build_token_texts
from sglang_parse.options.request import MAX_VERIFY_SEGMENTS
from sglang_parse.options.server import ParseConfig

DEFAULTS = ParseConfig()
# target_passes of a portable report counts requests and generated tokens.
NOTHING_JUDGED: dict[str, Any] = {
    "mode": "portable",
    "target_passes": 0,
    "draft_tokens": 0,
    "client_tokens": 0,
    "judged_segments": 0,
    "kept_segments": 0,
    "judged_tokens": 0,
    "kept_tokens": 0,
    "kept_client_tokens": 0,
    "matched_tokens": 0,
    "written_tokens": 0,
    "segments": [],
}


def verify(
    backend: Any,
    executor: StreamExecutor,
    text: str | Sequence[str],
    options: dict[str, Any],
    tokenizer_path: str | None,
) -> dict[str, Any]:
    """Report of judging every prefix of `text` after the executor's prompt."""
    target = load_target(tokenizer_path or _served_tokenizer(backend))
    # What is judged is all of the text.
    target = dataclasses.replace(target, skips=False)
    tokens, boundaries = target.cut(text, options, MAX_VERIFY_SEGMENTS)
    return _judge(
        backend, executor, target, tokens, boundaries, options, verify_only=True
    )


@dataclass
class Start:
    """What was kept of the draft, and where ordinary generation goes on.

    request: what a backend reads of an executor. finish_reason: set if nothing is left
    to generate. report: of the judging, if there was any.
    """

    text: str
    request: Any
    num_tokens: int = 0
    finish_reason: dict[str, Any] | None = None
    report: dict[str, Any] = field(default_factory=dict)

    def rest_of(self, params: SglSamplingParams) -> SglSamplingParams:
        """Parameters of what remains to be generated, by the target alone."""
        left = params.max_new_tokens - self.num_tokens
        return ParseSamplingParams.of(
            params, {"parse_mode": "off"}, max_new_tokens=left
        )

    def answer(self) -> Answer:
        """The kept text alone, with a report of it."""
        meta_info = {"completion_tokens": 0, "finish_reason": self.finish_reason}
        return self.text, self.meta_info(meta_info, "")

    def meta_info(self, meta_info: dict[str, Any], written: str) -> dict[str, Any]:
        """meta_info of the whole answer, given that of the generated rest."""
        num_written = meta_info.get("completion_tokens", 0)  # none where aborted
        report = {**NOTHING_JUDGED, **self.report}
        report["target_passes"] += num_written
        report["written_tokens"] = num_written
        if written:
            # Generated text comes without token ids.
            span = {
                "origin": "target",
                "outcome": "written",
                "start": self.num_tokens,
                "token_ids": [],
                "text": written,
                "text_start": len(self.text),
                "score": None,
                "drafter": "",
                "judge": "",
            }
            report["segments"] = [*report["segments"], span]
        total = self.num_tokens + num_written
        return {**meta_info, "completion_tokens": total, KEY: [report]}


def keep_draft(
    backend: Any,
    executor: StreamExecutor,
    params: SglSamplingParams,
    options: dict[str, Any],
    tokenizer_path: str | None,
) -> Start:
    """Judge the draft, if any, and keep its valid prefix.

    The answer is the target's own, whatever the draft says, in mode `exact` and `off`,
    and where a PARSE server would not judge it either or a stop cannot be found in it.
    """
    mode = options.get("parse_mode", DEFAULTS.mode)
    draft = options.get("parse_draft")
    if not draft or mode != "semantic" or not _is_judgeable(params):
        return Start("", executor)
    target = load_target(tokenizer_path or _served_tokenizer(backend))
    draft, stop = _before_stop(draft, params.stop)
    tokens, boundaries = target.cut(draft, options, DEFAULTS.max_segments)
    limit = params.max_new_tokens
    fits = [b for b in boundaries if b <= limit]
    if not fits:
        return Start("", executor)
    report = _judge(
        backend,
        executor,
        target,
        tokens[: fits[-1]],
        fits,
        options,
        verify_only=False,
    )
    kept = [s for s in report["segments"] if s["outcome"] == "kept"]
    text = "".join(s["text"] for s in kept)
    num_tokens = report["kept_tokens"]
    request = SimpleNamespace(text_=executor.text_ + text, images_=executor.images_)
    finish_reason = None
    if num_tokens >= limit:
        finish_reason = {"type": "length", "length": limit}
    elif stop and len(kept) == len(boundaries):
        finish_reason = {"type": "stop", "matched": stop}
    return Start(text, request, num_tokens, finish_reason, report)


def _is_judgeable(params: SglSamplingParams) -> bool:
    """Whether nothing asked for concerns the target's distribution at single tokens
    (request.py, `strongest_mode`) or ends the answer at a token or pattern."""
    return not any(
        (
            *(params.regex, params.json_schema, params.dtype, params.return_logprob),
            *(params.frequency_penalty, params.presence_penalty),
            *(params.min_new_tokens, params.stop_token_ids),
            getattr(params, "stop_regex", None),
        )
    )


def _before_stop(text: str, stop: str | Iterable[str]) -> tuple[str, str]:
    """`text` up to the first stop string, and that string if there is one."""
    stops = [stop] if isinstance(stop, str) else list(stop)
    found = [(at, s) for s in stops if s and (at := text.find(s)) >= 0]
    if not found:
        return text, ""
    at, first = min(found)
    return text[:at], first


@dataclass(frozen=True)
class Target:
    """A target's tokenizer with its table of token texts. skips: special tokens are
    no part of the text, as in answers."""

    tokenizer: Any
    token_texts: Sequence[str]
    skips: bool = True

    def cut(
        self, text: str | Sequence[str], options: dict[str, Any], max_segments: int
    ) -> tuple[list[int], list[int]]:
        """Token ids of the text and the boundaries after which it is judged."""
        if not isinstance(text, str):
            parts = [self.encode(part) for part in text]
            ends = [sum(map(len, parts[: k + 1])) for k in range(len(parts))]
            return [t for part in parts for t in part], ends
        tokens = self.encode(text)
        name = options.get("parse_segmenter", DEFAULTS.segmenter)
        found = Segmenter(name, self.token_texts).boundaries(
            tokens, ended=True, max_segments=max_segments
        )
        return tokens, list(found)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def span(
        self,
        tokens: Sequence[int],
        start: int,
        end: int,
        *,
        where: int,
        outcome: str,
        score: float,
    ) -> dict[str, Any]:
        """tokens[start:end] as a reported segment that stands behind `where` tokens."""
        before = len(self.decode(tokens[:start]))
        return {
            "origin": "client",
            "outcome": outcome,
            "start": where,
            "token_ids": list(tokens[start:end]),
            "text": self.decode(tokens[:end])[before:],
            "text_start": len(self.decode(tokens[:where])),
            "score": score,
            "drafter": "",
            "judge": "suffix",
        }

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=self.skips)
        return text

    def judge(self, options: dict[str, Any]) -> JudgePrompt:
        question = options.get("parse_judge_suffix", DEFAULTS.judge_suffix)
        return build_judge_prompt(self.tokenizer, question, DEFAULTS.verdict_pairs)


@functools.lru_cache(maxsize=4)
def load_target(path: str) -> Target:
    """Raises RuntimeError if no tokenizer can be loaded from the path or name."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as e:
        raise RuntimeError(
            f"portable=True needs the target's tokenizer, which {path!r} does not "
            "give here; pass tokenizer= with its folder or name."
        ) from e
    return Target(tokenizer, build_token_texts(tokenizer))


def _served_tokenizer(backend: Any) -> str:
    info = getattr(backend, "model_info", None)
    if not info:
        raise RuntimeError(
            "portable=True needs an SGLang backend, RuntimeEndpoint or EngineBackend, "
            f"not {type(backend).__name__}."
        )
    return str(info.get("tokenizer_path") or info["model_path"])


def _judge(
    backend: Any,
    executor: StreamExecutor,
    target: Target,
    tokens: Sequence[int],
    boundaries: Sequence[int],
    options: dict[str, Any],
    *,
    verify_only: bool,
) -> dict[str, Any]:
    """Report of judging `tokens` at `boundaries` after the executor's prompt.

    verify_only: nothing is generated, so nothing counts as kept in an output.
    """
    judge = target.judge(options)
    prompt = target.tokenizer.encode(executor.text_)
    scores = judge_prefixes(backend, executor, prompt, tokens, boundaries, judge)
    num_valid = count_valid_segments(
        scores,
        threshold=options.get("parse_threshold", DEFAULTS.threshold),
        keep_rule=options.get("parse_keep_rule", DEFAULTS.keep_rule),
    )
    num_kept = boundaries[num_valid - 1] if num_valid else 0
    return {
        **NOTHING_JUDGED,
        "target_passes": len(boundaries) + 1,
        "client_tokens": len(tokens),
        "judged_segments": len(boundaries),
        "kept_segments": num_valid,
        "judged_tokens": boundaries[-1],
        "kept_tokens": 0 if verify_only else num_kept,
        "kept_client_tokens": 0 if verify_only else num_kept,
        "segments": [
            target.span(
                tokens,
                start,
                end,
                where=start if end <= num_kept or verify_only else num_kept,
                outcome="kept" if end <= num_kept else "rejected",
                score=score,
            )
            for start, end, score in zip(
                [0, *boundaries], boundaries, scores, strict=False
            )
        ],
    }


def judge_prefixes(
    backend: Any,
    executor: StreamExecutor,
    prompt: Sequence[int],
    tokens: Sequence[int],
    boundaries: Sequence[int],
    judge: JudgePrompt,
) -> list[float]:
    """Score of each prefix: two requests, the second one a batch."""
    if executor.images_:
        raise ValueError("portable=True judges text only; the prompt has an image.")
    greedy = {"max_new_tokens": 1, "temperature": 0.0}
    whole = {"input_ids": [*prompt, *tokens], "sampling_params": greedy}
    backend._generate_http_request(executor, whole)
    forks = {
        "input_ids": [[*prompt, *tokens[:b], *judge.suffix] for b in boundaries],
        "sampling_params": greedy,
        "return_logprob": True,
        "token_ids_logprob": [t for pair in judge.verdict_ids for t in pair],
    }
    results = backend._generate_http_request(executor, forks)
    return [_score(result["meta_info"], judge) for result in results]


def _score(meta_info: dict[str, Any], judge: JudgePrompt) -> float:
    """P(yes) / (P(yes) + P(no)), summed over the pairs, as decide.verdict_scores."""
    given = {t: lp for lp, t, _ in meta_info["output_token_ids_logprobs"][0]}
    top = max(given[t] for pair in judge.verdict_ids for t in pair)
    yes = sum(math.exp(given[y] - top) for y, _ in judge.verdict_ids)
    no = sum(math.exp(given[n] - top) for _, n in judge.verdict_ids)
    return yes / (yes + no)
