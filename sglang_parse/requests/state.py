"""What is remembered of a request between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_parse.judging.fences import FenceReader
from sglang_parse.judging.prompt import JudgePrompt
from sglang_parse.options.request import REST, RequestOptions
from sglang_parse.reporting.report import RequestReport
from sglang_parse.requests.client_text import ClientText
from sglang_parse.requests.draft import Draft


@dataclass(eq=False)
class RequestState:
    """A running request. Drafters keep their own memory of it, with this as the key."""

    options: RequestOptions
    #: Tokens that end the response.
    stop_ids: frozenset[int]
    #: What prefixes are judged with; None where nothing is judged.
    judge: JudgePrompt | None
    report: RequestReport
    #: What gives its verdicts, as `parse_judge` names it.
    judge_kind: str = "suffix"
    #: The text that came with the request.
    client: ClientText | None = None
    #: Tokens that follow the bonus token and are not verified: what the last pass left
    #: over, and what was drafted since.
    draft: Draft = Draft()
    #: Tokens decided ahead of the output; the KV of all but the last is written.
    ready: tuple[int, ...] = ()
    #: Segments that the target must still write itself after a rejection.
    recovering: int = 0
    #: Tokens, the last ones decided, that it has written of the first of them.
    num_begun: int = 0
    #: Tokens left of those at whose end a verdict failed; one segment of them is wrong.
    num_suspect: int = 0
    #: A text judged alone whose verdicts are not complete: the request takes no part in
    #: rounds (client_texts/verifications.py).
    verification: Any = None
    #: Where blocks of code open and close in what is decided.
    fences: FenceReader = field(default_factory=FenceReader)
    #: Names of the drafters that failed for this request and are not asked again.
    failed_drafters: set[str] = field(default_factory=set)

    @property
    def pending(self) -> tuple[int, ...]:
        """The tokens that are drafted and not verified."""
        return self.draft.tokens

    @property
    def suffix(self) -> tuple[int, ...]:
        """Judge suffix tokens; empty where nothing is judged."""
        return self.judge.suffix if self.judge else ()

    @property
    def recovers_for_good(self) -> bool:
        """Whether the target writes the rest of the response itself."""
        return self.recovering >= REST // 2

    @property
    def is_exact(self) -> bool:
        """Whether the target is followed token by token to the end."""
        return self.options.mode == "exact" or self.recovers_for_good

    @property
    def is_ending(self) -> bool:
        """Whether the tokens decided ahead end the response."""
        return bool(self.ready) and self.ready[-1] in self.stop_ids

    def follow_verdict(self, num_accepted: int, rejected_end: int) -> None:
        """After a round. rejected_end: of its draft, 0 where no verdict failed."""
        end = rejected_end or self.num_suspect
        self.num_suspect = max(0, end - num_accepted)

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
        tokens = self.client.propose(output)
        self.draft = Draft(tokens, num_client=len(tokens))


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
