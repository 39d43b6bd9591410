"""A client's text as a draft behind its prompt: what fits, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_parse.engine.segmenting import Segmenting, between, first_empty
from sglang_parse.options.extensions import ExtensionError
from sglang_parse.options.validation import MAX_VERIFY_SEGMENTS
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.limits import draft_window, fit_windows, longest_draft
from sglang_parse.requests.refusal import bad_request, cannot_judge
from sglang_parse.requests.round_records import RequestRound, Segments
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl.scheduler_types import SchedulerRequest

# Rows that all passes over one text may have: eight prefills of 8192 tokens.
MAX_VERIFY_ROWS = 1 << 16
UNBOUNDED = 1 << 30


@dataclass(frozen=True)
class Text:
    """A request of a batch with a client's text behind its prompt."""

    #: Its place in the batch.
    index: int
    req: SchedulerRequest
    state: RequestState
    #: Its row of req_to_token.
    row: int

    def round(self) -> RequestRound:
        """A record whose pass starts at the prompt's last token."""
        prompt = self.req.origin_input_ids
        return RequestRound(
            self.req, self.state, self.row, len(prompt) - 1, prompt[-1], output_len=0
        )


@dataclass(frozen=True)
class Bounds:
    """What a text has to fit into."""

    #: Of the target, in tokens.
    context_len: int
    #: KV slots that can be had now, and of the whole pool.
    num_free: int
    num_slots: int
    #: Rows of the longest pass.
    max_rows: int


def draft_of(r: RequestRound, segmenting: Segmenting, bounds: Bounds) -> None:
    """Fill `draft` and `segments` from the text that came with the request.

    Raises Refusal where a text to verify cannot be judged as a whole.
    """
    client = r.state.client
    assert client is not None
    verify_only = r.state.options.verify_only
    now, alone = _windows(r, bounds)
    num = len(client.tokens)
    if verify_only:
        if alone < num:
            _refuse_length(num, alone, bounds, suffix_len=len(r.state.suffix))
        now = num  # where there is no room yet, it waits
    complete = now == num
    r.draft = Draft(client.tokens[:now], complete, num_client=now)
    cuts = client.cuts
    if cuts is None:
        most = MAX_VERIFY_SEGMENTS if verify_only else segmenting.max_segments
        cuts = _found_cuts(r, segmenting, most)
    elif (empty := first_empty(cuts)) is not None:
        raise bad_request(
            f"custom_params.parse_verify[{empty}] has no tokens under this model's "
            "tokenizer; leave it out."
        )
    exact_end = 0
    if not verify_only:
        exact_end, now = segmenting.head_end(r)
    r.segments = Segments(between(exact_end, cuts, now), exact_end=exact_end)
    if verify_only:
        _check_verdicts(r, bounds)


def _found_cuts(r: RequestRound, segmenting: Segmenting, most: int) -> tuple[int, ...]:
    """Where the segmenter cuts the text. Where it fails, the text is followed token by
    token; one that is to be judged alone cannot be served then."""
    try:
        return segmenting.client_boundaries(r, most=most)
    except ExtensionError as error:
        if r.state.options.verify_only:
            raise cannot_judge(str(error)) from error
        return ()


def _windows(r: RequestRound, bounds: Bounds) -> tuple[int, int]:
    """Tokens of the text that fit now, and those that would fit alone."""
    client, state = r.state.client, r.state
    assert client is not None
    verify_only = state.options.verify_only
    num = len(client.tokens)
    wanted = draft_window(
        num if verify_only else min(num, longest_draft(r.req)),
        num_remaining=UNBOUNDED
        if verify_only
        else r.req.sampling_params.max_new_tokens,
        num_positions=bounds.context_len - r.seq_len - 1 - len(state.suffix),
    )
    held = r.req.kv.kv_allocated_len

    def fit(room: int) -> int:
        # Behind a text that is kept whole comes a token that SGLang, which knows of
        # the prompt alone, reserves no slot for.
        return fit_windows(
            [wanted],
            seq_lens=[r.seq_len + 1],
            held=[held],
            max_rows=bounds.max_rows,
            room=room,
        )[0]

    return fit(bounds.num_free), fit(bounds.num_slots - held)


def _refuse_length(num: int, alone: int, bounds: Bounds, *, suffix_len: int) -> None:
    shorten = "shorten it."
    if suffix_len > num:  # the longer of the two
        shorten = (
            f"shorten the question, custom_params.parse_judge_suffix ({suffix_len} "
            "tokens)."
        )
    raise bad_request(
        f"custom_params.parse_verify has {num} tokens and there is room for {alone} "
        f"behind this prompt, in a pass of at most {bounds.max_rows} "
        f"(--chunked-prefill-size); {shorten}"
    )


def _check_verdicts(r: RequestRound, bounds: Bounds) -> None:
    """Every verdict fits into some pass, and all passes into the bound."""
    suffix_len, num_tokens = len(r.state.suffix), len(r.draft.tokens)
    most = min(bounds.max_rows, bounds.num_slots - r.req.kv.kv_allocated_len)
    room = most - 1 - num_tokens
    if r.segments.boundaries and room < suffix_len:
        raise bad_request(
            f"the judge suffix has {suffix_len} tokens and there is room for {room} "
            "behind this text; shorten custom_params.parse_judge_suffix."
        )
    left, total, num_passes = r.segments.boundaries, 0, 0
    num_verdicts = len(left)
    while left:
        part = fitting(left, suffix_len, most)
        total += 1 + part[-1] + len(part) * suffix_len
        num_passes += 1
        left = left[len(part) :]
    if total > MAX_VERIFY_ROWS:
        raise bad_request(
            f"custom_params.parse_verify asks for {num_verdicts} verdicts, "
            f"which take {num_passes} passes over the text; expected at most "
            f"{MAX_VERIFY_ROWS} rows in all: give fewer segments or a shorter "
            "custom_params.parse_judge_suffix."
        )


def cost(r: RequestRound, boundaries: Sequence[int]) -> int:
    """Rows of a pass over the text up to its last boundary, with all its suffixes."""
    end = boundaries[-1] if boundaries else len(r.draft.tokens)
    return 1 + end + len(boundaries) * len(r.state.suffix)


def fitting(left: Sequence[int], suffix_len: int, room: int) -> tuple[int, ...]:
    """The first of the boundaries left that can be judged in one pass of `room` rows.

    A pass holds the text up to its last boundary and a suffix for each of them.
    """
    num = 0
    while num < len(left) and 1 + left[num] + (num + 1) * suffix_len <= room:
        num += 1
    return tuple(left[:num])
