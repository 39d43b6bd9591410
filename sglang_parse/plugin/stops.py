"""The tokens of a step end where the answer would end if they came one at a time.

SGLang takes all tokens of a step and then looks for the end of the answer. Its counts,
metrics, logprobs and sessions have taken the tokens behind the end by then, and of two
stops it finds the one that the request lists first. A step of PARSE may be a whole
answer, so the end is found before SGLang gets the tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Any

from sglang_parse.sgl.scheduler_types import SchedulerRequest
from sglang_parse.shield.bounded_stops import SEARCH


def num_kept(
    req: SchedulerRequest, tokens: Sequence[int], stop_ids: Collection[int]
) -> int:
    """How many of a step's tokens the answer keeps, the one that ends it included.

    stop_ids: tokens that end the answer. SGLang's rules are in schedule_batch.py,
    `Req.update_finish_state`.
    """
    if len(tokens) <= 1:
        return len(tokens)
    num = min(len(tokens), req.sampling_params.max_new_tokens - len(req.output_ids))
    for i, token in enumerate(tokens[:num]):
        if token in stop_ids or not 0 <= token < req.vocab_size:
            num = i + 1
            break
    if req.grammar is not None and num > 1:
        num = _grammar_end(req.grammar, tokens[:num])
    return _text_end(req, tokens[:num])


def look_at_last_token(
    original: Callable[..., bool], req: SchedulerRequest, new_accepted_len: int = 1
) -> bool:
    """AROUND hook on Req._check_str_based_finish: look for stops as behind one token.

    Nothing ends the answer before the last token of a step (`num_kept`). In the text of
    all of them SGLang would find stops that it misses in single tokens.
    """
    return original(req, min(new_accepted_len, 1))


def _grammar_end(grammar: Any, tokens: Sequence[int]) -> int:
    """Tokens up to the one with which the grammar ends, all if none does. SGLang ends
    a request whose grammar refuses a token."""
    num = 0
    try:
        for token in tokens:
            grammar.accept_token(token)
            num += 1
            if grammar.is_terminated():
                break
        grammar.rollback(num)
    except ValueError:
        return len(tokens)
    return num


def _text_end(req: SchedulerRequest, tokens: Sequence[int]) -> int:
    """Tokens up to the first behind which there is a stop string or a match of a stop
    expression, all if there is none.

    Behind each token SGLang decodes as many tokens as the longest stop may have, and
    one more. `longest_draft` (requests/limits.py) bounds the time that this takes.
    """
    params = req.sampling_params
    strings, expressions = params.stop_strs, params.stop_regex_strs
    if not strings and not expressions:
        return len(tokens)
    width = 1 + max(params.stop_str_max_len, params.stop_regex_max_len)
    ids = [*req.output_ids[-width:], *tokens]
    begin, decode = len(ids) - len(tokens), req.tokenizer.decode

    def has_string(text: str) -> bool:
        return any(one in text for one in strings)

    first = 1
    if not expressions and _decodes_evenly(req.tokenizer, strings):
        # No stop is in a prefix that is shorter than the first to hold one.
        ends = range(1, len(tokens) + 1)
        first += bisect_left(
            ends, True, key=lambda end: has_string(decode(ids[: begin + end]))
        )
    for end in range(first, len(tokens) + 1):
        text = decode(ids[max(0, begin + end - width) : begin + end])
        if has_string(text) or any(SEARCH.ends(req, one, text) for one in expressions):
            return end
    return len(tokens)


def _decodes_evenly(tokenizer: Any, strings: Sequence[str]) -> bool:
    """Whether later tokens change nothing of a stop string in the text before them."""
    cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    return not cleans and not any("\ufffd" in text for text in strings)
