"""`sglang-parse calibrate`: the fastest setting that keeps an accuracy budget.

Settings are tried on a running server through per-request options. Some problems screen
them. The remaining settings are then tested on fresh problems, from the most cautious
to the boldest, until one is not shown to keep the budget (fixed-sequence testing, so
the confidence holds for whichever is chosen). If none passes, the choice is `exact`
mode, which writes what the target writes, or `off` if that is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tqdm import tqdm

from sglang_parse.calibrate.answers import final_answer
from sglang_parse.calibrate.calibrate_options import CalibrateOptions
from sglang_parse.calibrate.calibrate_report import report_text, write_files
from sglang_parse.calibrate.problems import Item, load_items
from sglang_parse.calibrate.served import served_settings, server_info
from sglang_parse.calibrate.trials import (
    EXACT,
    OFF,
    Calibration,
    Outcome,
    Setting,
    Trial,
    both,
    candidates,
    choose,
    compare,
)
from sglang_parse.demo.figures import RequestResult
from sglang_parse.demo.load import (
    LoadError,
    Prompt,
    encode_chat,
    load_tokenizer,
    measure,
)

WARM_UP = 8
Ask = Callable[[Setting, Sequence[Item]], Sequence[RequestResult]]


def calibrate(
    options: CalibrateOptions, items: Sequence[Item], ask: Ask
) -> Calibration:
    """Choose a setting. The first `screen` items screen, the others test.

    ask: returns the answers that one setting gives to some items.
    """
    screen, fresh = slice(options.screen), slice(options.screen, None)
    alone = ask(OFF, items)
    has_gold = all(item.reference is not None for item in items)

    def graded(part: slice, answers: Sequence[RequestResult]) -> Outcome:
        return grade(items[part], alone[part], answers, has_gold=has_gold)

    def measured(setting: Setting, part: slice) -> Outcome:
        return graded(part, ask(setting, items[part]))

    def trial(setting: Setting) -> Trial:
        base = graded(fresh, alone[fresh])
        return compare(setting, measured(setting, fresh), base, options.confidence)

    # In order and in reverse, because a server that adapts carries over what it learnt
    # from one setting to the next.
    tried = [EXACT, *options.settings()]
    there = [measured(s, screen) for s in tried]
    back = [measured(s, screen) for s in reversed(tried)][::-1]
    base = graded(screen, alone[screen])
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
    # Ratios compare only on the same problems, so exact mode is measured again.
    fresh_floor = trial(EXACT)
    chosen, tested = choose(order, trial, budget=options.budget, floor=fresh_floor)
    reference = "references" if has_gold else "agreement with target-only answers"
    tests = (fresh_floor, *tested)
    return Calibration(chosen, tuple(screened), tests, floor, reference)


def grade(
    items: Sequence[Item],
    alone: Sequence[RequestResult],
    answers: Sequence[RequestResult],
    *,
    has_gold: bool,
) -> Outcome:
    """Which answers are right, and their seconds.

    alone: the target's own answers, whose final answers are the reference without gold.
    """
    right = [
        item.is_right(answer.text)
        if has_gold
        else final_answer(answer.text) == final_answer(own.text)
        for item, own, answer in zip(items, alone, answers, strict=True)
    ]
    return Outcome(tuple(right), tuple(a.latency_s for a in answers))


def run_calibration(options: CalibrateOptions) -> str:
    """Calibrate against a running server, write the files, return the report.

    Raises ValueError before any request is sent, LoadError when the server fails.
    """
    options.settings()  # checks the values before the server is contacted
    count = options.problems + options.screen
    items = load_items(options.prompts, problems=count, seed=options.seed)
    if len(items) < count:
        raise ValueError(
            f"--prompts {options.prompts} has {len(items)} problems, expected "
            f"--problems {options.problems} plus --screen {options.screen}."
        )
    info = server_info(options.url)
    served = served_settings(info, options.url)
    encoded = partial(encode, load_tokenizer(info["tokenizer_path"]), info, options)
    screenings = 2 * (len(options.settings()) + 1) * options.screen
    with tqdm(total=2 * len(items) + screenings, unit="req") as bar:

        def ask(setting: Setting, some: Sequence[Item]) -> Sequence[RequestResult]:
            bar.set_description(setting.label)
            bar.total = max(bar.total or 0, bar.n + len(some))
            return ask_setting(options, setting, encoded(some), bar.update)

        ask(OFF, items[:WARM_UP])
        bar.reset()
        found = calibrate(options, items, ask)
    write_files(options, found, served)
    return report_text(options, found)


def encode(
    tokenizer: Any, info: Mapping[str, Any], options: Any, items: Sequence[Item]
) -> list[Prompt]:
    """The items as chats, whose answers end with the server's context at the latest.

    options: with `chat_template` and `max_new_tokens`.
    """
    ids = [encode_chat(tokenizer, i.prompt, options.chat_template) for i in items]
    left = (info["max_req_input_len"] - len(one) for one in ids)
    most = options.max_new_tokens
    return [Prompt(None, one, min(most, n)) for one, n in zip(ids, left, strict=True)]


def ask_setting(
    options: CalibrateOptions,
    setting: Setting,
    prompts: Sequence[Prompt],
    on_answer: Callable[[], object],
) -> Sequence[RequestResult]:
    """The answers, in order, from an empty radix cache. Raises LoadError that names the
    setting."""
    try:
        return measure(
            options.url,
            prompts,
            concurrency=options.concurrency,
            custom_params=setting.custom_params(),
            on_answer=on_answer,
        ).results
    except LoadError as e:
        raise LoadError(f"{setting.label}: {e}") from e
