"""`sglang-parse calibrate`: the fastest setting that keeps to an accuracy budget.

Settings are tried through per-request options on a running server. Some problems
screen them; on fresh ones the survivors are then tested from the most cautious to the
boldest, until one is not shown to keep to the budget (fixed-sequence testing, so the
confidence holds for whichever is chosen). Where none is, `exact` mode is the answer:
it writes what the target writes. Where that is slower than the target alone, `off` is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from tqdm import tqdm

from sglang_parse.bench.arms import ARMS
from sglang_parse.bench.calibrate_options import CalibrateOptions
from sglang_parse.bench.calibrate_report import report_text, write_files
from sglang_parse.bench.checkers import final_answer, is_right
from sglang_parse.bench.conversation import Chat, ask_all, named_errors
from sglang_parse.bench.datasets import DATA_SETS, Item, load_items
from sglang_parse.bench.load import flush_cache, load_tokenizer, open_session
from sglang_parse.bench.procedures import Answer, Client
from sglang_parse.bench.served import check_questions, served_settings, server_info
from sglang_parse.bench.trials import (
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
from sglang_parse.options.server import ParseConfig

WARM_UP = 8
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
