"""Whether a drafter of single tokens drafts, such as a head, and when it rests."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sglang_parse.policy.controller import Controller
from sglang_parse.policy.protocols import Agreement, Writer
from sglang_parse.policy.rest import Pays, Rest
from sglang_parse.requests.round import RequestRound, Round

logger = logging.getLogger(__name__)


class HeadPlanner:
    """Asks drafters of single tokens where what they write pays.

    drafters: those of single tokens, but for one that copies; the first that can draft
    for a request does.
    """

    def __init__(
        self,
        drafters: Sequence[Writer],
        controller: Controller,
        ranks: Agreement,
    ) -> None:
        self.drafters = drafters
        self.controller = controller
        self.ranks = ranks
        self.rest = Rest()

    def writer(self, r: RequestRound) -> Writer | None:
        """Who drafts token by token for this request."""
        if self.rest.resting:
            return None
        return next((d for d in self.drafters if d.can_draft(r)), None)

    def ask(self, round: Round) -> None:
        """Nobody else drafts: do drafts that are followed token by token pay?"""
        bs, pays = len(round), Pays.NO
        budgets = [max(r.budgets.values(), default=0) for r in round]
        can_try = any(budgets) and self.rest.may_ask(sum(map(bool, budgets)), bs)
        if can_try or self.rest.is_woken:
            ours = self._pays(bs, max(budgets), can_try=can_try)
            pays = Pays(self.ranks.agree(ours))
        if pays in (Pays.TRIAL, Pays.YES):
            round.chains = self.controller.chain_rule(bs)
        else:
            for r in round:
                r.budgets = {}
        # A head that cannot draft, as under a grammar, is not one that does not pay.
        if any(budgets) or self.rest.is_woken:
            self.rest.follow(pays, bs, self.controller.ms)
            if self.rest.resting:
                logger.info("PARSE: the head does not pay at %d requests and rests", bs)

    def _pays(self, bs: int, steps: int, *, can_try: bool) -> Pays:
        """On this rank. Woken at one number of requests, it may be asked at another."""
        is_due = self.rest.is_over(bs, self.controller.ms)
        is_due = is_due or self.controller.head_would_pay(bs, self._max_tokens)
        if self.rest.is_woken and not is_due:
            return Pays.NOT_YET
        if not can_try:
            return Pays.NO
        tried = self.rest.tried if self.rest.trial else None
        return self.controller.head_pays(bs, steps, tried)

    @property
    def _max_tokens(self) -> int:
        return max(d.max_tokens for d in self.drafters)

    def look(self, round: Round) -> None:
        """Wake the head where it paid at this number of requests, or to try it."""
        if not self.rest.is_time_to_look():
            return
        bs = len(round)
        wakes = self.controller.head_would_pay(bs, self._max_tokens)
        wakes = wakes or self.rest.is_over(bs, self.controller.ms)
        if self.ranks.agree(int(wakes)):
            logger.info("PARSE: the head reads again, for new requests")
            self.rest.wake()

    def learn(self, round: Round, tokens: int, ms: float) -> None:
        """Count what a round gave, if no other drafter wrote in it.

        tokens: of all its requests. ms: of the round.
        """
        drafts = [r.draft for r in round]
        awake = bool(self.drafters) and not self.rest.resting
        if awake and not any(d.num_segment_level or d.num_copied for d in drafts):
            names = {d.name for d in self.drafters}
            was_asked = any(r.budgets.keys() & names for r in round)
            drafted = sum(bool(d.num_token_level) for d in drafts)
            token_ms = self.controller.costs.plain_ms(len(round)) / len(round)
            num = drafted if self.rest.trial and was_asked else None
            self.rest.tried.add(tokens, ms, token_ms, num)
