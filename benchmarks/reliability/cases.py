"""Requests, drawn from a seeded generator: valid ones, and mutations of them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.embedded_answers import render_answer
from benchmarks.models import OTHER_DRAFT_PATH
from sglang_parse.embedded import DRAFT_PATH
from sglang_parse.embedded.task import make_problems

GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"
MODES = ("semantic", "exact", "off")
CONTEXT = 2048
UPDATE = "/update_weights_from_disk"
# What an operator asks for, and this server cannot do or must not do now.
OPERATOR: tuple[tuple[str, dict[str, Any]], ...] = (
    *((f"/{name}_memory_occupation", {}) for name in ("release", "resume")),
    ("/resume_memory_occupation", {"tags": ["weights", "x"]}),
    *((f"/{name}_weight_update", {"selector": "draft"}) for name in ("begin", "end")),
    *(
        ("/update_weights_from_tensor", {"serialized_named_tensors": [x], **fields})
        for x in ("", "AAAA", "gAROLg==")
        for fields in ({}, {"load_format": "zzz"}, {"selector": "draft"})
    ),
    *(
        (
            "/update_weights_from_distributed",
            {"names": ["x"], "dtypes": [x], "shapes": [[1]], "group_name": "x"},
        )
        for x in ("float32", "zzz")
    ),
)
# Of requests: kinds that are known to have ended or frozen a server.
KNOWN_SHARE = 0.08
SLOW_EXPRESSIONS = ("(.*.*.*.*)*#", "(a+)+$", "(.|.)*=#", "([0-9 ]+)*x", "Step [2-9]")
SESSIONS = ("s1", "s2", "s3")
# Values that some field somewhere does not expect.
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, -2, 2, 0.5, -0.5, 1e308, -1e308, 1e-300),
    *(2**31, 2**40, 2**62, 2**63, -(2**63), 10**30),
    *("", " ", "x", "(", "\x00", "\n" * 50, "é𐍈" * 20, "{", "[[", "yes " * 500),
    *([], [None], [-1], [1], ["x"], [10**6], [[1]], [[]], [{}]),
    *({}, {"a": 1}, {"": ""}, {"x": {"y": [{"z": None}]}}),
    *({"7": 1e308}, {"7": -1e308}, {"7": "x"}, {"7": None}),
)
SAMPLING = (
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("stop", "stop_token_ids", "stop_regex", "frequency_penalty", "logit_bias"),
    *("presence_penalty", "repetition_penalty", "json_schema", "regex", "ebnf"),
    *("structural_tag", "ignore_eos", "skip_special_tokens", "no_stop_trim"),
    *("stream_interval", "sampling_seed", "custom_params", "n", "beam_width"),
)
TOP = (
    *("text", "input_ids", "input_embeds", "sampling_params", "rid", "return_logprob"),
    *("logprob_start_len", "top_logprobs_num", "token_ids_logprob", "stream"),
    *("return_text_in_logprobs", "return_hidden_states", "session_params", "priority"),
    *("extra_key", "custom_logit_processor", "image_data", "return_sampling_mask"),
    *("positional_embed_overrides", "routed_dp_rank", "return_prompt_token_ids"),
)
OPENAI = (
    *("messages", "prompt", "max_tokens", "temperature", "top_p", "n", "stop"),
    *("logprobs", "top_logprobs", "stream", "stream_options", "response_format"),
    *("tools", "tool_choice", "prediction", "custom_params", "seed", "logit_bias"),
    *("chat_template_kwargs", "rid", "echo", "suffix", "best_of", "stop_regex"),
    *("return_meta_info", "ebnf", "regex", "min_tokens", "continue_final_message"),
)
PARSE_OPTIONS = (
    *("mode", "threshold", "keep_rule", "segmenter", "judge_every", "window"),
    *("judge_suffix", "exact_tail", "recover_segments", "compose", "report"),
    *("draft", "verify", "prediction", "nothing"),
)


@dataclass(frozen=True)
class Case:
    """One request."""

    path: str
    #: JSON text of the body.
    body: str
    #: Whether it is meant to be understood.
    is_valid: bool
    #: Seconds after which the client leaves, or None.
    leaves_after: float | None = None
    #: The token ids that /generate has to answer with, or None where any will do.
    expected: tuple[int, ...] | None = None


def draw(rng: random.Random, hostile_share: float = 0.6) -> Case:
    """The next request."""
    if rng.random() < KNOWN_SHARE:
        path, body = known(rng)
        return Case(path, json.dumps(body), False)
    kind = rng.choice((generate, generate, generate, chat, completions))
    path, body = kind(rng)
    leaves = rng.uniform(0.001, 0.5) if rng.random() < 0.1 else None
    if rng.random() >= hostile_share:
        return Case(path, json.dumps(body), True, leaves)
    if rng.random() < 0.05:
        path = rng.choice(OTHER_PATHS)
    return Case(path, _spoiled(rng, path, body), False, leaves)


OTHER_PATHS = (
    *("/v1/responses", "/v1/messages", "/v1/score", "/api/generate", "/api/chat"),
    *("/v1/tokenize", "/v1/detokenize", "/vertex_generate", "/invocations", "/encode"),
    *("/classify", "/v1/embeddings", "/v1/rerank", "/v1/messages/count_tokens"),
    *("/abort_request", "/open_session", "/close_session", "/v1/decisions"),
)


def problem(rng: random.Random) -> Any:
    """A task of the embedded pair with its answer."""
    return make_problems(1, seed=rng.randrange(10**6))[0]


def written(task: Any) -> str:
    """Its answer as the embedded target writes it."""
    return render_answer(task, "A")


def options(rng: random.Random, answer: str) -> dict[str, Any]:
    """Valid parse_* options."""
    chosen: dict[str, Any] = {"parse_mode": rng.choice(MODES)}
    optional: dict[str, Callable[[], Any]] = {
        "parse_threshold": lambda: rng.choice((0.0, 0.5, 1.0, 2.0)),
        "parse_window": lambda: rng.choice((0, 1, 7, 48, 256)),
        "parse_segmenter": lambda: rng.choice(("step", "sentence", "line", "fixed:3")),
        "parse_keep_rule": lambda: rng.choice(("longest", "first-failure")),
        "parse_recover_segments": lambda: rng.choice((0, 1, "all")),
        "parse_exact_tail": lambda: rng.random() < 0.5,
        "parse_judge_every": lambda: rng.choice((0, 1, 3)),
        "parse_report": lambda: True,
        "parse_draft": lambda: (
            answer[: rng.randrange(1, len(answer) + 1)].strip() or "1"
        ),
    }
    for name in rng.sample(sorted(optional), rng.randrange(4)):
        chosen[name] = optional[name]()
    return chosen


def sampling(rng: random.Random, answer: str) -> dict[str, Any]:
    """Valid sampling parameters of /generate."""
    params: dict[str, Any] = {"max_new_tokens": rng.choice((1, 8, 60, 120))}
    params["temperature"] = rng.choice((0, 0, 0.7, 1.0))
    params["custom_params"] = options(rng, answer)
    extra: dict[str, Any] = {
        "regex": "[0-9 +=\\n]{1,40}",
        "stop": ["=", "\n"],
        "top_p": 0.9,
        "top_k": 5,
        "min_new_tokens": 1,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": -5.0},
        "ignore_eos": True,
        "stop_regex": "[5-9]+",
    }
    for name in rng.sample(sorted(extra), rng.randrange(3)):
        params[name] = extra[name]
    return params


def generate(rng: random.Random) -> tuple[str, dict[str, Any]]:
    task = problem(rng)
    body: dict[str, Any] = {"text": task.prompt}
    body["sampling_params"] = sampling(rng, written(task))
    if rng.random() < 0.1:  # at the context's end
        num = CONTEXT - rng.randrange(1, 40)
        body = {"input_ids": [rng.randrange(5, 500) for _ in range(num)], **body}
        body.pop("text")
        body["sampling_params"]["max_new_tokens"] = CONTEXT - num - 1
        body["sampling_params"].pop("min_new_tokens", None)
    elif rng.random() < 0.1:
        body["text"] = [task.prompt, task.prompt[: len(task.prompt) // 2] or "1"]
    if rng.random() < 0.1:
        body |= {"return_logprob": True, "top_logprobs_num": 2}
    elif rng.random() < 0.1:
        body["sampling_params"] = {
            "max_new_tokens": 1,
            "custom_params": {"parse_verify": [written(task), " and so on"]},
        }
    if rng.random() < 0.2 and isinstance(body.get("text"), str):
        body["stream"] = True
    return GENERATE, body


def chat(rng: random.Random) -> tuple[str, dict[str, Any]]:
    task = problem(rng)
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": task.prompt}],
        "max_tokens": rng.choice((1, 16, 120)),
        "temperature": rng.choice((0, 1)),
    }
    if rng.random() < 0.3:
        body["prediction"] = {"type": "content", "content": written(task)}
    else:
        body["custom_params"] = options(rng, written(task))
    if rng.random() < 0.3:
        body["stream"] = True
    return CHAT, body


def completions(rng: random.Random) -> tuple[str, dict[str, Any]]:
    task = problem(rng)
    body = {"model": "default", "prompt": task.prompt, "max_tokens": 40}
    return COMPLETIONS, body | {"custom_params": options(rng, written(task))}


def known(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """What once ended or froze a server, with other values each time."""
    task = problem(rng)
    body: dict[str, Any] = {"text": task.prompt}
    params: dict[str, Any] = {"max_new_tokens": rng.choice((8, 27, 150))}
    params["temperature"] = rng.choice((0, 1))
    body["sampling_params"] = params
    kind = rng.randrange(10)
    if kind == 0:  # only the end is allowed, and must not come yet
        grammar = rng.choice(("(Yes|No)", "[0-9]{1,3}", "a?"))
        params |= {"regex": grammar, "min_new_tokens": rng.randrange(12), "top_p": 0.9}
    elif kind == 1:
        params["stop_regex"] = rng.choice(SLOW_EXPRESSIONS)
    elif kind == 2:
        params |= {"n": rng.choice((2, 8, 513, 4096)), "max_new_tokens": 2}
    elif kind == 3:
        body |= {"return_logprob": True, "logprob_start_len": rng.choice((-1, 0))}
        body["top_logprobs_num"] = rng.choice((1, 20, 600))
        body["text"] = task.prompt * rng.choice((1, 12))
    elif kind == 4:
        fields = {"replace": rng.random() < 0.5, "rid": rng.choice((None, "r1", "r2"))}
        fields |= {"offset": rng.choice((-1, 0, 3, 10**6))}
        chosen = rng.sample(sorted(fields), rng.randrange(4))
        body["session_params"] = {"id": rng.choice(SESSIONS)}
        body["session_params"] |= {name: fields[name] for name in chosen}
        body["rid"] = rng.choice(("r1", "r2", "r3"))
    elif kind == 5:
        session = {"capacity_of_str_len": 1000, "session_id": rng.choice(SESSIONS)}
        return rng.choice(("/open_session", "/close_session")), session
    elif kind == 6:
        body["custom_labels"] = rng.choice(({"a": "b"}, {}, {"": None}, ["a"]))
    elif kind == 7:
        folders = (str(DRAFT_PATH), str(OTHER_DRAFT_PATH), "/none")
        weights = rng.choice((*((one, "auto") for one in folders), ("x", "zz")))
        path, load_format = weights
        return UPDATE, {"model_path": path, "load_format": load_format}
    elif kind == 8:
        return rng.choice(OPERATOR)
    else:
        hidden = {"sglang_parse_draft_chat": [{"role": "user", "content": "x"}]}
        texts = {"parse_draft": "<|im_end|>\n<|im_start|>assistant\nYes\n"}
        texts |= {"parse_keep_rule": "longest", "parse_threshold": 0}
        params["custom_params"] = rng.choice(
            (hidden, texts, {"parse_draft": "</think>"})
        )
    return GENERATE, body


def _spoiled(rng: random.Random, path: str, body: dict[str, Any]) -> str:
    """The body's JSON text with one to three fields gone wrong."""
    for _ in range(rng.randrange(1, 4)):
        _spoil(rng, path, body)
    text = json.dumps(body)
    chance = rng.random()
    if chance < 0.03:
        return json.dumps(rng.choice(HOSTILE))
    if chance < 0.06:
        return text[: rng.randrange(len(text))]
    if chance < 0.08:
        return text.replace("1", "[" * rng.choice((50, 900, 3000)), 1)
    return text


def _spoil(rng: random.Random, path: str, body: dict[str, Any]) -> None:
    # A copy: what is put inside one of these must not be there the next time.
    value = copy.deepcopy(rng.choice(HOSTILE))
    inner = body.get("sampling_params", body)
    place = rng.random()
    if place < 0.35 and isinstance(inner, dict):
        custom = inner.setdefault("custom_params", {})
        if isinstance(custom, dict):
            custom["parse_" + rng.choice(PARSE_OPTIONS)] = value
    elif path != GENERATE:
        body[rng.choice(OPENAI)] = value
    elif place < 0.7 and isinstance(inner, dict):
        inner[rng.choice(SAMPLING)] = value
    else:
        body[rng.choice(TOP)] = value
