"""Shorter windows for requests whose verdicts fail more often than others'."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

from sglang_parse.policy.goodput import Drafts
from sglang_parse.requests.round import RequestRound
from sglang_parse.requests.state import RequestState

# Failing verdicts of its own that the server's rate counts for with a request.
TRUST = 4.0


class OwnWindows:
    """How often the verdicts of each request have failed so far.

    drafts: what is known of all requests' drafts.
    """

    def __init__(self, drafts: Drafts) -> None:
        self.drafts = drafts
        #: Failing verdicts, and judged tokens.
        self.seen: WeakKeyDictionary[RequestState, tuple[float, float]] = (
            WeakKeyDictionary()
        )

    def fit(self, state: RequestState, steps: int) -> int:
        """New draft tokens of a request where others have `steps`.

        The best window goes with one over the square root of the rate of failures.
        """
        if state not in self.seen:
            return steps
        failures, judged = self.seen[state]
        rate = self.drafts.valid.rate
        own = (TRUST + failures) / (TRUST / rate + judged)
        least = round(1.5 * self.drafts.segment_len)
        return min(steps, max(least, round(steps * math.sqrt(rate / own))))

    def learn(self, r: RequestRound) -> None:
        """Count the verdicts of a judged round, before the request's state moves on."""
        judged = max(r.rejected_end, r.decision.num_judged) - r.exact_end
        if not r.boundaries or judged <= 0:
            return
        fails = r.rejected_end > r.state.num_suspect
        failures, tokens = self.seen.get(r.state, (0.0, 0.0))
        self.seen[r.state] = failures + fails, tokens + judged
