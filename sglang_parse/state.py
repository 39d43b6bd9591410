"""What the worker remembers of a request between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sglang_parse.client import ClientText
from sglang_parse.judge import JudgePrompt
from sglang_parse.metrics import RequestReport
from sglang_parse.request import REST, RequestOptions
from sglang_parse.window import SHORT_WINDOW

if TYPE_CHECKING:
    from sglang_parse.eagle import HeadHint


@dataclass
class RequestState:
    """num_cached: leading positions with draft KV, None until looked up.

    pending: drafted tokens that follow the bonus token and await a boundary;
    pending_ended: whether the draft ended the response after them; num_client: leading
    pending tokens that are the client's. judged_window, followed_window: adapted
    windows of rounds with verdicts and of rounds followed token by token, 0 while
    unlimited: agreement token by token ends early, agreement in meaning does not.
    client: the text that came with the request. ready: tokens decided ahead of the
    output, the KV of all but the last written. recovering: segments the target still
    writes itself; num_begun: tokens, the last ones decided, that it has written of the
    first of them. num_suspect: tokens left of those at whose end a verdict failed, the
    wrong segment among them. hint: where the EAGLE-3 head goes on, None if it cannot.
    """

    options: RequestOptions
    stop_ids: frozenset[int]
    judge: JudgePrompt | None
    report: RequestReport
    num_cached: int | None = None
    pending: tuple[int, ...] = ()
    pending_ended: bool = False
    num_client: int = 0
    judged_window: int = 0
    followed_window: int = SHORT_WINDOW
    client: ClientText | None = None
    ready: tuple[int, ...] = ()
    recovering: int = 0
    num_begun: int = 0
    num_suspect: int = 0
    hint: HeadHint | None = None

    @property
    def suffix(self) -> tuple[int, ...]:
        """Judge suffix tokens; empty where nothing is judged."""
        return self.judge.suffix if self.judge else ()

    @property
    def is_exact(self) -> bool:
        """Whether the target is followed token by token to the end."""
        return self.options.mode == "exact" or self.recovering > REST // 2

    @property
    def is_ending(self) -> bool:
        """Whether the tokens decided ahead end the response."""
        return bool(self.ready) and self.ready[-1] in self.stop_ids

    def window(self, *, judged: bool) -> int:
        """The adapted window of a round with verdicts or without."""
        return self.judged_window if judged else self.followed_window

    def follow_verdict(self, num_accepted: int, rejected_end: int) -> None:
        """After a round. rejected_end: of its draft, 0 where no verdict failed."""
        end = rejected_end or self.num_suspect
        self.num_suspect = max(0, end - num_accepted)

    def leave_head_out(self) -> None:
        """The EAGLE-3 head lacks part of the prompt: it neither drafts nor follows."""
        self.options = replace(self.options, compose=False)

    def awaits_judgement(self, req: Any) -> bool:
        """Whether a client's text is to be judged before the first token is sent."""
        return (
            self.client is not None
            and self.options.mode == "semantic"
            and not req.output_ids
        )

    def follow_client(self, output: Sequence[int]) -> None:
        """Take the rest of the client's text as the pending draft, where it fits."""
        if self.client is None or self.pending:
            return
        self.pending = self.client.propose(output)
        self.num_client = len(self.pending)
        self.pending_ended = False


@dataclass(frozen=True)
class RoundDraft:
    """One request's draft this round: pending tokens, the head's, the draft model's.

    num_new: the last; num_client: leading ones from the client; num_head: leading ones
    of the EAGLE-3 head, which writes only where nothing is pending. num_forwarded:
    sequence positions with draft KV afterwards, 0 if the draft model did not run for
    this request.
    """

    tokens: tuple[int, ...] = ()
    ended: bool = False
    num_new: int = 0
    num_forwarded: int = 0
    num_client: int = 0
    num_head: int = 0


def stop_token_ids(req: Any, model_eos_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that end this request (schedule_batch.py, `_check_token_based_finish`)."""
    params = req.sampling_params
    if params.ignore_eos:
        return frozenset()
    ids = set(params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    ids |= model_eos_ids
    if req.tokenizer is not None:
        ids.add(req.tokenizer.eos_token_id)
        ids |= set(req.tokenizer.additional_stop_token_ids or ())
    # A request may list what is no token at all, int64 or not.
    return frozenset(i for i in ids if i is not None and 0 <= i < req.vocab_size)
