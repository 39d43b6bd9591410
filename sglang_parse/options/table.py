"""The table of options: one field of one class declares an option and all about it.

The class says who may set it: the server and each request (`SharedOptions`), the server
alone (`ServerOptions`), or a request alone (`RequestOnlyOptions`). Flags and their
--help, keys of the JSON file, checks, request fields, keywords of `parse_gen` and the
tables of the documentation are all read from here. To add an option, add a field and
use its value.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_parse.options.judge_names import QUESTION_JUDGE
from sglang_parse.options.kinds import (
    DRAFTERS,
    JUDGE,
    NAME,
    PATH,
    QUESTION,
    SEGMENT_COUNT,
    SEGMENTER,
    SEGMENTS,
    SWITCH,
    URL,
    VERDICT_PAIRS,
    Kind,
    choice,
    client_text,
    number,
    place,
    whole,
)
from sglang_parse.options.validation import (
    AUTO,
    DRAFT_KEY_ENV,
    MAX_VERIFY_SEGMENTS,
)

FLAG_PREFIX = "--speculative-parse-"
REQUEST_PREFIX = "parse_"
MODES = ("semantic", "exact", "off")
CLIENT_OPTIONS = ("safe", "none", "all")
KEEP_RULES = ("first-failure", "longest")
EAGLE3, MTP, DFLASH, DSPARK = "eagle3", "mtp", "dflash", "dspark"
#: Heads of a target.
HEADS = (EAGLE3, MTP, DFLASH, DSPARK)
#: Those that `--speculative-parse-eagle-model-path` names.
HEADS_OF_PATH = (EAGLE3, DFLASH, DSPARK)
#: The options that name a head: the target's, and the draft model's.
HEAD_PATHS = ("eagle_model_path", "draft_eagle_model_path")
COMPOSITIONS = ("none", *HEADS)
#: Heads of a draft model.
DRAFT_HEADS = (EAGLE3, MTP)
DRAFT_COMPOSITIONS = (AUTO, "ngram", *DRAFT_HEADS, "none")
PROOFS = ("off", "fast", "full")
JUDGE_KINDS = ("suffix", "probe", "auto")
DEFAULT_JUDGE_SUFFIX = "Is everything so far correct? Answer Yes or No."
MAX_THRESHOLD = 2.0


#: Groups of the server's options, as --help and the documentation show them; the last
#: one has all others.
GROUPS: dict[str, tuple[str, ...]] = {
    "most used": (
        *("mode", "threshold", "segmenter", "window", "client_options"),
        *("compose", "eagle_model_path", "drafters", "draft_url", "adaptive"),
    ),
    "verdicts": (
        *("keep_rule", "judge_every", "judge_suffix", "exact_tail"),
        *("recover_segments", "max_segments", "judge", "verdict_tokens"),
        *("probe", "probe_check", "probe_agreement", "probe_collect"),
    ),
    "drafters, passes and streams": (),
}


@dataclass(frozen=True)
class Option:
    """One row of the table."""

    #: Field of ParseConfig or RequestOptions, and key of the JSON file.
    name: str
    default: Any
    kind: Kind
    #: One to three sentences in Markdown; --help shows them without backticks.
    help: str
    #: Keyword of `parse_gen`, or "" where programs cannot set it.
    keyword: str
    #: Whether `parse_verify` has the keyword too.
    judges: bool

    @property
    def flag(self) -> str:
        """`max_segments` -> `--speculative-parse-max-segments`."""
        return flag_name(self.name)

    @property
    def request_field(self) -> str:
        """`threshold` -> `parse_threshold`."""
        return REQUEST_PREFIX + self.name


def grouped(rows: Sequence[Option]) -> dict[str, list[Option]]:
    """The rows by group, in the groups' order."""
    left = {row.name: row for row in rows}
    found = {
        title: [left.pop(name) for name in names if name in left]
        for title, names in GROUPS.items()
    }
    found[list(GROUPS)[-1]] += left.values()
    return found


def flag_name(name: str) -> str:
    """`max_segments` -> `--speculative-parse-max-segments`."""
    return FLAG_PREFIX + name.replace("_", "-")


def option(
    default: Any,
    kind: Kind,
    help: str,
    *,
    keyword: str | None = None,
    judges: bool = False,
) -> Any:
    """Declare an option as a dataclass field. keyword: None means the field's name."""
    about = {"kind": kind, "help": help, "keyword": keyword, "judges": judges}
    return dataclasses.field(default=default, metadata={"option": about})


def options_of(cls: type) -> tuple[Option, ...]:
    """The rows that a class declares or inherits, in order."""
    return _options_of(cls)


@functools.cache  # a server asks for every request
def _options_of(cls: Any) -> tuple[Option, ...]:
    found = []
    for f in dataclasses.fields(cls):
        if about := f.metadata.get("option"):
            keyword = f.name if about["keyword"] is None else about["keyword"]
            row = Option(f.name, f.default, **{**about, "keyword": keyword})
            found.append(row)
    return tuple(found)


@dataclass(frozen=True)
class SharedOptions:
    """Set for the server, and again by any request for itself."""

    mode: str = option(
        "semantic",
        choice(MODES, metavar="MODE"),
        "How requests are served. `semantic` judges prefixes of the draft, `exact` "
        "keeps only tokens that the target would have produced, `off` uses no draft.",
    )
    threshold: float = option(
        0.5,
        number(0.0, MAX_THRESHOLD),
        "A prefix is valid when P(yes) / (P(yes) + P(no)) reaches this value. "
        "Above 1 no prefix is valid.",
        judges=True,
    )
    keep_rule: str = option(
        "first-failure",
        choice(KEEP_RULES, metavar="RULE"),
        "`first-failure` keeps the draft up to the last boundary before the first "
        "failing verdict, `longest` up to the last passing verdict.",
        judges=True,
    )
    segmenter: str = option(
        "step",
        SEGMENTER,
        "Where the draft is cut into segments.",
        keyword="segment",
        judges=True,
    )
    judge_every: int = option(
        0,
        whole(0, 1024),
        "Judge at least at every N-th boundary, evenly spaced, and at the last one. "
        "0 judges at every boundary, or, while windows adapt, as rarely as every third "
        "where verdicts are measured to cost more than they save.",
    )
    window: int = option(
        256,
        whole(0, 1 << 20),
        "Draft tokens per round, at most 64 under a grammar. 0 drafts the whole "
        "response, as in the paper.",
    )
    judge_suffix: str = option(
        DEFAULT_JUDGE_SUFFIX,
        QUESTION,
        "The question that the target is asked after each prefix.",
        judges=True,
    )
    exact_tail: bool = option(
        True,
        SWITCH,
        "After the cut, keep draft tokens as long as they equal the target's own "
        "choice.",
    )
    exact_head: int = option(
        0,
        whole(0, 1 << 20),
        "The first N tokens of an answer, and of what follows the end of thinking, are "
        "the target's own. Verdicts count behind them.",
    )
    recover_segments: int | str = option(
        1,
        SEGMENT_COUNT,
        "Segments that the target writes itself after a failing verdict, before "
        "verdicts count again. With `all` it writes the rest of the response, as in "
        "the paper.",
    )
    stream_tokens: int = option(
        0,
        whole(0, 1 << 20),
        "Tokens of one event of a stream. What a step gave beyond that comes in "
        "several events, at once. 0 stands for 1 on a server with "
        "`--tool-call-parser` or `--reasoning-parser`, whose parsers read small "
        "pieces, and for whole steps on others.",
        keyword="",
    )


@dataclass(frozen=True)
class ServerOptions(SharedOptions):
    """The shared options, and those that only the server's owner sets."""

    client_options: str = option(
        "safe",
        choice(CLIENT_OPTIONS, metavar="WHICH"),
        "Which `parse_*` options a request may set. With `safe` a request may be "
        "stricter than the server and never looser, and what changes no answer is "
        "open. `none` refuses them all, `all` trusts clients with every value.",
    )
    inert_messages: bool = option(
        True,
        SWITCH,
        "Special tokens in the messages of users and tools are read as plain text at "
        "the chat endpoints, so that no document forges a turn. Without it they are "
        "special, as on a stock server.",
    )
    max_segments: int = option(
        16, whole(1, 1024), "Prefixes that are judged per request in one pass."
    )
    judge: str = option(
        QUESTION_JUDGE,
        JUDGE,
        "Which judge scores a prefix. `question` asks the target `judge-suffix` and "
        "compares its answers. A threshold belongs to the judge that it was chosen "
        "for.",
    )
    verdict_tokens: str = option(
        "Yes/No",
        VERDICT_PAIRS,
        "The answers that count as yes and as no. Each is a single token.",
    )
    adaptive: bool = option(
        True,
        SWITCH,
        "Windows follow acceptance and measured cost. Rounds go without verdicts, or "
        "without a draft, where that is measured to be faster.",
    )
    max_round_ms: int = option(
        100,
        whole(0, 1 << 20, metavar="MS"),
        "Milliseconds of a draft phase while a request waits for its prefill. "
        "0 sets no bound. The bound needs adaptive windows.",
    )
    probe: str = option(
        "",
        place("a file of `benchmarks.train_probe`", "FILE"),
        "A probe of this target: it reads verdicts from hidden states, without rows of "
        "its own. It is trained on the question's verdicts, and may be wrong where "
        "the question is right. `benchmarks.train_probe` writes it.",
    )
    probe_check: float = option(
        0.02,
        number(0.0, 1.0),
        "Share of the probe's boundaries at which the question is asked as well. 0 "
        "leaves the probe without a guard.",
    )
    probe_agreement: float = option(
        0.95,
        number(0.0, 1.0),
        "Agreement with the question below which the probe is not used.",
    )
    probe_collect: str = option(
        "",
        place("a file to write", "FILE"),
        "Where pairs of hidden states and verdicts are written, 20,000 at most, for "
        "`benchmarks.train_probe`. They tell of the texts of clients.",
    )
    prove: str = option(
        "fast",
        choice(PROOFS, metavar="WHEN"),
        "Whether the server compares its fast paths with plain ones when it starts, on "
        "its own device, and switches off those that differ. `fast` leaves out what "
        "the same server has proven before, `full` tries every captured size.",
    )
    compose: str = option(
        "none",
        choice(COMPOSITIONS),
        "A head of the target drafts where the target is followed token by token. "
        "`eagle3` is the EAGLE-3 head, and `dflash` or `dspark` the draft of that "
        "kind, that `--speculative-parse-eagle-model-path` names; `mtp` is the head "
        "for multi-token prediction in the target's own checkpoint.",
    )
    eagle_model_path: str = option(
        "",
        PATH,
        "The target's EAGLE-3 head, or its DFLASH or DSpark draft. Set it together "
        "with `eagle3`, `dflash` or `dspark` of `--speculative-parse-compose`, never "
        "alone.",
    )
    eagle_steps: int = option(
        4,
        whole(1, 64),
        "Tokens that the target's head drafts at a time. `dflash` and `dspark` drafts "
        "write as many as they were trained for.",
    )
    draft_compose: str = option(
        AUTO,
        choice(DRAFT_COMPOSITIONS),
        "How the draft model's own steps are fewer. `auto` is `eagle3` where that head "
        "is named, and `ngram` elsewhere. `ngram` guesses what the model "
        "wrote before after the same two or three tokens, and the model checks several "
        "guesses in one step, so that its drafts stay the same. It is at work only "
        "while at least 35% of the tokens are guessed. `eagle3` takes the guesses of a "
        "head of the draft model, while that is measured to be faster, and `mtp` those "
        "of the head for multi-token prediction in the draft's own checkpoint.",
    )
    draft_eagle_model_path: str = option(
        "",
        PATH,
        "The draft model's EAGLE-3 head, for `auto` or `eagle3` of "
        "`--speculative-parse-draft-compose`.",
    )
    drafters: str = option(
        AUTO,
        DRAFTERS,
        "The drafters, in the order of their turns. `auto` takes the draft model, the "
        "draft server and the target's head where other flags name them. `ngram` "
        "copies earlier text of the prompt and the answer, and needs no model.",
    )
    draft_url: str = option(
        "",
        URL,
        "An OpenAI-compatible server that drafts, with its version. It is sent prompts "
        f"and answers. Its API key is read from `${DRAFT_KEY_ENV}` alone.",
    )
    draft_url_model: str = option(
        "", NAME, "The model requested there; by default the first it lists."
    )


@dataclass(frozen=True)
class RequestOnlyOptions:
    """Set by a request alone; the default is what holds without the field."""

    compose: bool = option(
        True,
        SWITCH,
        "`false` keeps the target's head and the n-gram drafter out of this request. "
        "On a server without them the field has no effect.",
    )
    judge: str = option(
        "auto",
        choice(JUDGE_KINDS, metavar="KIND"),
        "What gives verdicts. `suffix` asks the target after each prefix, `probe` "
        "reads its hidden states. `auto` reads the probe, and asks the target on a "
        "server without a probe for this request.",
    )
    report: bool = option(False, SWITCH, "`true` lists the segments in the report.")
    draft: str = option(
        "",
        client_text(),
        "Text that you already have, taken as the draft of this response from its "
        "first token. Its prefixes are judged in one pass, the valid part is kept, and "
        "the server's own draft model continues. In `exact` mode it is followed token "
        "by token.",
    )
    verify: str | tuple[str, ...] = option(
        "",
        SEGMENTS,
        "A text, or its segments, of which every prefix is judged while nothing is "
        "generated. One target pass is enough unless free KV slots are short. A text "
        f"with more than {MAX_VERIFY_SEGMENTS} boundaries is judged at that many of "
        "them. Needs `max_new_tokens: 1` (`max_tokens` at the OpenAI endpoints); "
        "ignore the one token returned.",
        keyword="",
    )
    prediction: str = option(
        "",
        client_text(),
        "What `prediction` of the OpenAI API becomes. It is followed token by token "
        "unless `parse_mode` is `semantic`.",
        keyword="",
    )
