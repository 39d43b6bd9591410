"""`sglang-parse calibrate`: the fastest setting that keeps to an accuracy budget.

Settings are tried through per-request options on a running server. Some problems
screen them; on fresh ones the survivors are then tested from the most cautious to the
boldest, until one is not shown to keep to the budget (fixed-sequence testing, so the
confidence holds for whichever is chosen). Where none is, `exact` mode is the answer:
it writes what the target writes. Where that is slower than the target alone, `off` is.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scipy.stats import norm
from tqdm import tqdm

from sglang_parse.bench.arms import ARMS
from sglang_parse.bench.checkers import final_answer, is_right
from sglang_parse.bench.datasets import DATA_SETS, Item, load_items
from sglang_parse.bench.load import (
    flush_cache,
    load_tokenizer,
    open_session,
)
from sglang_parse.bench.procedures import Answer, Client
from sglang_parse.bench.provenance import provenance
from sglang_parse.bench.run import Chat, ask_all, named_errors
from sglang_parse.bench.stats import loss_bound, tango_interval
from sglang_parse.options.checks import check_choice, check_count, shown
from sglang_parse.options.judges import QUESTION_JUDGE
from sglang_parse.options.server import ParseConfig

THRESHOLDS = (0.3, 0.5, 0.7, 0.9, 0.97)
SEGMENTERS = ("step", "paragraph", "fixed:32")
WARM_UP = 8
UNGRADED = ("rating", "none")  # checkers of open answers, which nothing compares


@dataclass(frozen=True)
class Setting:
    """Fields of ParseConfig that a request may set; None keeps the server's own.

    mode: always said, so that a server of another mode serves what is tried.
    """

    threshold: float | None = None
    segmenter: str | None = None
    keep_rule: str | None = None
    judge_suffix: str | None = None
    mode: str = "semantic"
    #: `suffix`, `probe` or `auto`, on a server with a probe.
    judge: str | None = None

    def fields(self) -> dict[str, Any]:
        """What is set, as keys of the file for --speculative-parse-config.

        The probe itself is a setting of the server (`with_judge`).
        """
        found = {k: v for k, v in vars(self).items() if k != "judge"}
        return {k: v for k, v in found.items() if v is not None}

    def with_judge(self, served: Mapping[str, Any]) -> dict[str, Any]:
        """The server's settings with the probe that this one uses, or without one."""
        found = dict(served)
        if self.judge == "suffix":
            found = {k: v for k, v in found.items() if not k.startswith("probe")}
        elif self.judge is not None:
            found["probe_doubt"] = self.judge == "auto"
        return found

    def options(self) -> dict[str, Any]:
        """The same as custom_params of a request."""
        found = {f"parse_{k}": v for k, v in self.fields().items()}
        return found | ({"parse_judge": self.judge} if self.judge else {})

    @property
    def label(self) -> str:
        found = self.fields() | ({"judge": self.judge} if self.judge else {})
        if self.mode == "semantic" and len(found) > 1:
            del found["mode"]
        return ", ".join(f"{k}={v}" for k, v in found.items())


OFF, EXACT = Setting(mode="off"), Setting(mode="exact")


@dataclass(frozen=True)
class Outcome:
    """Answers of one setting, item by item: whether right, and seconds."""

    right: tuple[bool, ...]
    seconds: tuple[float, ...]


def both(one: Outcome, other: Outcome) -> Outcome:
    """Two measurements of the same items: right if both are, at their mean time."""
    pairs = zip(one.seconds, other.seconds, strict=True)
    return Outcome(
        tuple(a and b for a, b in zip(one.right, other.right, strict=True)),
        tuple((a + b) / 2 for a, b in pairs),
    )


@dataclass(frozen=True)
class Trial:
    """One setting against target-only answers. loss: points of accuracy lost; bound:
    upper bound of it at the confidence asked for. ratio: answers per second over those
    of the same server's target alone (`parse_mode: off`)."""

    setting: Setting
    problems: int
    accuracy: float
    loss: float
    bound: float
    lost: int
    gained: int
    ratio: float


def compare(
    setting: Setting, outcome: Outcome, base: Outcome, confidence: float
) -> Trial:
    """outcome, base: of the same items."""
    pairs = list(zip(outcome.right, base.right, strict=True))
    lost = sum(theirs and not ours for ours, theirs in pairs)
    gained = sum(ours and not theirs for ours, theirs in pairs)
    return Trial(
        setting=setting,
        problems=len(pairs),
        accuracy=sum(outcome.right) / len(pairs),
        loss=100 * (lost - gained) / len(pairs),
        bound=loss_bound(lost, gained, len(pairs), confidence),
        lost=lost,
        gained=gained,
        ratio=sum(base.seconds) / sum(outcome.seconds),
    )


def candidates(
    screened: Sequence[Trial], *, budget: float, confidence: float, exact_ratio: float
) -> list[Setting]:
    """Settings worth testing, from the most cautious to the boldest: by the loss that
    screening found, and by threshold where it found the same.

    Those whose screening shows a loss over the budget are out, and so are those no
    faster than exact mode or the target alone. Of equally cautious ones the fastest is
    kept, and only if it is faster than every more cautious one.
    """
    z = float(norm.ppf(confidence))
    fit = []
    for trial in screened:
        _, high = tango_interval(trial.gained, trial.lost, trial.problems, z)
        if -100 * high <= budget:
            fit.append(trial)
    found: list[Setting] = []
    fastest = max(1.0, exact_ratio)
    for _, group in itertools.groupby(sorted(fit, key=_boldness), key=_boldness):
        best = max(group, key=lambda t: t.ratio)
        if best.ratio > fastest:
            found.append(best.setting)
            fastest = best.ratio
    return found


def _boldness(trial: Trial) -> tuple[float, float]:
    value = trial.setting.threshold
    return max(0.0, trial.loss), -(ParseConfig.threshold if value is None else value)


def choose(
    settings: Sequence[Setting],
    test: Callable[[Setting], Trial],
    *,
    budget: float,
    floor: Trial,
) -> tuple[Trial, list[Trial]]:
    """Test `settings` in order while each is shown to keep to the budget.

    test: measures on problems that did not choose the settings. floor: exact mode, the
    choice if none passes or none is faster; the target alone is where that is slower.
    Returns the choice and all tests.
    """
    tests: list[Trial] = []
    alone = Trial(OFF, floor.problems, floor.accuracy + floor.loss / 100, 0, 0, 0, 0, 1)
    best = max(floor, alone, key=lambda t: t.ratio)
    for setting in settings:
        trial = test(setting)
        tests.append(trial)
        if trial.bound > budget:
            break
        if trial.ratio > best.ratio:
            best = trial
    return best, tests


def problems_needed(budget: float, confidence: float) -> int:
    """Fresh problems without any loss that show a loss of at most `budget` points."""
    return math.ceil(math.log(1 - confidence) / math.log(1 - budget / 100))


@dataclass(frozen=True)
class CalibrateOptions:
    """problems: fresh ones that test; screen: others that screen."""

    url: str
    out: Path
    dataset: str = "embedded"
    path: str = ""
    problems: int = 700
    screen: int = 100
    concurrency: int = 8
    budget: float = 0.5
    confidence: float = 0.95
    seed: int = 7
    max_new_tokens: int = 0
    thresholds: tuple[float, ...] = THRESHOLDS
    segmenters: tuple[str, ...] = SEGMENTERS
    keep_rules: tuple[str | None, ...] = (None,)
    judge_suffixes: tuple[str | None, ...] = (None,)
    chat_template: Mapping[str, Any] = field(default_factory=dict)
    #: Whether the server has a probe: then judges are swept too.
    has_probe: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.budget < 100 or not 0.5 <= self.confidence < 1:
            raise ValueError(
                f"--budget {self.budget} and --confidence {self.confidence}: expected "
                "points above 0 and below 100, and a share from 0.5 to below 1."
            )
        gradable = [n for n, d in DATA_SETS.items() if d.checker not in UNGRADED]
        check_choice(self.dataset, "--dataset", tuple(gradable))
        for name in ("problems", "screen", "concurrency"):
            check_count(getattr(self, name), f"--{name}", 1, 1 << 20)
        needed = problems_needed(self.budget, self.confidence)
        if self.problems < needed:
            raise ValueError(
                f"--problems {self.problems} cannot show a loss of at most "
                f"{self.budget:g} points at confidence {self.confidence:g}, even "
                f"without one wrong answer; give at least {needed}, a larger --budget "
                "or a lower --confidence."
            )

    def settings(self) -> list[Setting]:
        """The whole sweep. Raises ValueError on a value that PARSE does not know."""
        axes = (self.thresholds, self.segmenters, self.keep_rules, self.judge_suffixes)
        found = [Setting(*values) for values in itertools.product(*axes)]
        for setting in found:
            ParseConfig(**setting.fields())
        if not self.has_probe:
            return found
        # A probe is bound to the threshold, segmenter and question of its server.
        by_suffix = [replace(setting, judge="suffix") for setting in found]
        return [*by_suffix, Setting(judge="auto"), Setting(judge="probe")]


@dataclass(frozen=True)
class Calibration:
    """screened: the whole sweep on the screening problems, where `floor` is exact
    mode. tested: on fresh ones, exact mode first."""

    chosen: Trial
    screened: tuple[Trial, ...]
    tested: tuple[Trial, ...]
    floor: Trial
    reference: str


Ask = Callable[[Setting, Sequence[Item]], list[Answer]]


def calibrate(
    options: CalibrateOptions, items: Sequence[Item], ask: Ask
) -> Calibration:
    """The choice for `items`, of which the first `screen` screen the settings.

    ask: the answers of one setting to some items.
    """
    screen, fresh = items[: options.screen], items[options.screen :]
    checker = DATA_SETS[options.dataset].checker
    truth = {i.id: a for i, a in zip(items, ask(OFF, items), strict=True)}
    has_gold = all(is_right(checker, i, truth[i.id].text) is not None for i in items)

    def outcome(found: Sequence[Item], answers: Sequence[Answer]) -> Outcome:
        right = []
        for item, answer in zip(found, answers, strict=True):
            if has_gold:
                right.append(bool(is_right(checker, item, answer.text)))
            else:
                agreed = final_answer(truth[item.id].text)
                right.append(final_answer(answer.text) == agreed)
        return Outcome(tuple(right), tuple(a.latency_s for a in answers))

    def trial(setting: Setting, found: Sequence[Item]) -> Trial:
        base = outcome(found, [truth[i.id] for i in found])
        ours = outcome(found, ask(setting, found))
        return compare(setting, ours, base, options.confidence)

    # There and back: what one setting teaches a server that adapts weighs on the next.
    tried = [EXACT, *options.settings()]
    there = [outcome(screen, ask(s, screen)) for s in tried]
    back = [outcome(screen, ask(s, screen)) for s in reversed(tried)][::-1]
    base = outcome(screen, [truth[i.id] for i in screen])
    floor, *screened = (
        compare(s, both(a, b), base, options.confidence)
        for s, a, b in zip(tried, there, back, strict=True)
    )
    order = candidates(
        screened,
        budget=options.budget,
        confidence=options.confidence,
        exact_ratio=floor.ratio,
    )
    # Speeds compare on the same problems only.
    fresh_floor = trial(EXACT, fresh)
    chosen, tested = choose(
        order, lambda s: trial(s, fresh), budget=options.budget, floor=fresh_floor
    )
    reference = "references" if has_gold else "agreement with target-only answers"
    tests = (fresh_floor, *tested)
    return Calibration(chosen, tuple(screened), tests, floor, reference)


def run_calibration(options: CalibrateOptions) -> str:
    """Calibrate against a running server, write the files, return the report.

    Raises ValueError before anything is asked, LoadError when the server fails.
    """
    options.settings()  # fail before a server is asked
    items = load_items(
        options.dataset,
        problems=options.problems + options.screen,
        seed=options.seed,
        path=options.path,
    )
    if len(items) < options.problems + options.screen:
        raise ValueError(
            f"{options.path or options.dataset} has {len(items)} problems, expected "
            f"--problems {options.problems} plus --screen {options.screen}."
        )
    info = server_info(options.url)
    served = served_settings(info, options.url)
    check_questions(options, served)
    options = replace(options, has_probe=bool(served.get("probe")))
    settings = options.settings()
    chat = Chat(load_tokenizer(info["tokenizer_path"]), options.chat_template)
    total = 2 * len(items) + 2 * (len(settings) + 1) * options.screen
    with tqdm(total=total, unit="req") as bar:

        def ask(setting: Setting, found: Sequence[Item]) -> list[Answer]:
            bar.set_description(setting.label)
            bar.total = max(bar.total or 0, bar.n + len(found))
            return ask_setting(options, setting, found, chat, lambda: bar.update())

        ask(OFF, items[:WARM_UP])
        bar.reset()
        found = calibrate(options, items, ask)
    write_files(options, found, served)
    return report_text(options, found)


def server_info(url: str) -> dict[str, Any]:
    """`/server_info` of a server. Raises ValueError if nothing answers there."""
    try:
        with urllib.request.urlopen(url + "/server_info", timeout=30) as response:
            info: dict[str, Any] = json.load(response)
    except (urllib.error.URLError, OSError, ValueError) as e:
        raise ValueError(
            f"--url {url}: no SGLang server answers there ({e}); start one with "
            "--speculative-algorithm PARSE."
        ) from e
    return info


# Settings that belong to a server, whatever is asked of it.
SERVERS_OWN = (
    *("compose", "eagle_model_path", "eagle_steps", "drafters", "ngram_tokens"),
    *("draft_url", "draft_url_model", "draft_url_streams"),
)


def served_settings(info: Mapping[str, Any], url: str) -> dict[str, Any]:
    """The server's judge, and its other PARSE settings that are not the defaults.

    They are keys of the file for --speculative-parse-config: what was measured is the
    swept fields on top of them, and a threshold belongs to a judge. Raises ValueError
    if the server does not serve with PARSE, has no draft model to try settings with,
    or streams what the client here does not read.
    """
    states = info.get("internal_states") or [{}]
    settings = (states[0].get("parse") or {}).get("settings")
    if settings is None:
        raise ValueError(
            f"--url {url}: the server there does not serve with PARSE; start one with "
            "--speculative-algorithm PARSE."
        )
    if not info.get("speculative_draft_model_path"):
        raise ValueError(
            f"--url {url}: the server there has no draft model to judge; start it with "
            "--speculative-draft-model-path."
        )
    if info.get("incremental_streaming_output"):
        raise ValueError(
            f"--url {url}: the server there streams answers in pieces; "
            "start it without --incremental-streaming-output."
        )
    usual = json.loads(json.dumps(vars(ParseConfig())))
    return {
        name: value
        for name, value in settings.items()
        if name == "judge" or (name not in SERVERS_OWN and value != usual.get(name))
    }


def check_questions(options: CalibrateOptions, served: Mapping[str, Any]) -> None:
    """Raises ValueError on questions to try where the server's judge takes none."""
    judge = served.get("judge", QUESTION_JUDGE)
    given = [question for question in options.judge_suffixes if question is not None]
    if given and judge != QUESTION_JUDGE:
        raise ValueError(
            f"--judge-suffixes is {shown(given[0])} and the judge of the server at "
            f"--url {options.url} is {judge!r}, which takes no question; leave it out."
        )


def ask_setting(
    options: CalibrateOptions,
    setting: Setting,
    items: Sequence[Item],
    chat: Chat,
    on_answer: Callable[[], object],
) -> list[Answer]:
    """Answers of the items' last turns, in order. Raises LoadError."""
    with named_errors(setting.label):
        return asyncio.run(_ask(options, setting, items, chat, on_answer))


async def _ask(
    options: CalibrateOptions,
    setting: Setting,
    items: Sequence[Item],
    chat: Chat,
    on_answer: Callable[[], object],
) -> list[Answer]:
    """The radix cache is empty before."""
    limit = options.max_new_tokens or DATA_SETS[options.dataset].max_new_tokens
    found: dict[int, Answer] = {}

    def answered(index: int, answers: tuple[Answer, ...]) -> None:
        found[index] = answers[-1]
        on_answer()

    await flush_cache(options.url)
    async with open_session(options.concurrency) as session:
        client = Client(
            session=session,
            urls={"main": options.url},
            options=setting.options(),
            temperature=0.0,
            max_new_tokens=limit,
            threshold=ParseConfig.threshold,
            step_stop="",
            suffix=(),
            verdict_ids=(),
            decode=chat.decode,
        )
        arm = ARMS["parse"]
        await ask_all(client, arm, items, options.concurrency, chat, answered)
    return [found[index] for index in range(len(items))]


def write_files(
    options: CalibrateOptions, found: Calibration, served: Mapping[str, Any]
) -> None:
    """The setting for --speculative-parse-config, and beside it how it was found.

    served: what the server's own settings add to those that were swept.
    """
    chosen = found.chosen.setting
    config = {**chosen.with_judge(served), **chosen.fields()}
    options.out.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    report = {
        "chosen": _trial_row(found.chosen),
        "reference": found.reference,
        **{
            name: getattr(options, name)
            for name in ("dataset", "path", "seed", "concurrency", "url")
        },
        "served": served,
        "budget": options.budget,
        "confidence": options.confidence,
        "exact": _trial_row(found.floor),
        "screened": [_trial_row(t) for t in found.screened],
        "tested": [_trial_row(t) for t in found.tested],
        "provenance": provenance(),
    }
    path = options.out.with_suffix(".report.json")
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _trial_row(trial: Trial) -> Mapping[str, Any]:
    setting = trial.setting.fields()
    if trial.setting.judge:
        setting["judge_kind"] = trial.setting.judge
    return {**vars(trial), "setting": setting}


def report_text(options: CalibrateOptions, found: Calibration) -> str:
    """Markdown: the curve, the tests on fresh problems, and the choice."""
    parts = [
        f"Accuracy by {found.reference}; loss and bound in points against target-only "
        f"answers, bound at confidence {options.confidence:g}; ratio of answers/s.\n",
        "Screening:\n",
        _table([found.floor, *found.screened]),
        "On fresh problems:\n",
        _table(found.tested),
    ]
    chosen = found.chosen
    parts.append(
        f"Chosen: {chosen.setting.label}, {chosen.ratio:.2f}x the answers/s of the "
        "same server's target alone (parse_mode off); "
        f"start the server with --speculative-parse-config {options.out}. Measured at "
        f"concurrency {options.concurrency}; how much is judged depends on the load, "
        "so calibrate at the one you expect."
    )
    if chosen.setting.mode != "semantic":
        parts.append(
            "No semantic setting was shown to keep to the budget and to be faster; "
            f"{chosen.setting.mode} mode changes nothing. More --problems sharpen the "
            "test."
        )
    return "\n".join(parts)


def _table(trials: Sequence[Trial]) -> str:
    lines = [
        "| setting | problems | right % | loss | bound | ratio |",
        "|---" * 6 + "|",
    ]
    lines += [
        f"| {t.setting.label} | {t.problems} | {100 * t.accuracy:.1f} | {t.loss:+.2f} "
        f"| {t.bound:.2f} | {t.ratio:.2f} |"
        for t in trials
    ]
    return "\n".join(lines) + "\n"
