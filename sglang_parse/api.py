"""What packages that extend sglang_parse may rely on. Experimental until 1.0.

docs/extending.md shows one extension of each kind. Importing this module loads neither
torch nor sglang; a drafter's types load torch when they are first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_parse.drafting.drafter import Drafter as Drafter
    from sglang_parse.drafting.drafter import DrafterContext as DrafterContext
    from sglang_parse.drafting.drafter import DrafterResources as DrafterResources
    from sglang_parse.drafting.drafter import Prefill as Prefill
    from sglang_parse.drafting.drafter import PrefillRequest as PrefillRequest
    from sglang_parse.judging.draft_text import DraftText as DraftText
    from sglang_parse.judging.extension_rules import SegmentRule as SegmentRule
    from sglang_parse.judging.judges import Judge as Judge
    from sglang_parse.requests.draft import Draft as Draft
    from sglang_parse.requests.round_records import RequestRound as RequestRound
    from sglang_parse.requests.round_records import Round as Round

# Name -> where it is defined.
_HOME = {
    "Draft": "requests.draft",
    "DraftText": "judging.draft_text",
    "Drafter": "drafting.drafter",
    "DrafterContext": "drafting.drafter",
    "DrafterResources": "drafting.drafter",
    "Judge": "judging.judges",
    "Prefill": "drafting.drafter",
    "PrefillRequest": "drafting.drafter",
    "RequestRound": "requests.round_records",
    "Round": "requests.round_records",
    "SegmentRule": "judging.extension_rules",
}
__all__ = [
    "Draft",
    "DraftText",
    "Drafter",
    "DrafterContext",
    "DrafterResources",
    "Judge",
    "Prefill",
    "PrefillRequest",
    "RequestRound",
    "Round",
    "SegmentRule",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"sglang_parse.{_HOME[name]}"), name)
