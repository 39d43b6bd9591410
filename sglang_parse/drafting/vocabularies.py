"""How far two tokenizers agree, which decides how a draft reaches the target.

Where every id means the same to both, ids are handed over. Where they differ in added
tokens alone, ids are handed over and those tokens are kept out of the draft. Otherwise
the draft is handed over as text.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_parse.sgl.tokenizers import TokenizerSource

SAMPLE = "Step 1: 3.14 + 2,718 = 12345\n\n\tIt's naïve – 你好, привет 👍🏽. Yes No"


@dataclass(frozen=True)
class TokenizerMatch:
    """What two tokenizers share."""

    #: The first difference in words, without a full stop; "" where there is none.
    difference: str = ""
    #: Whether ids can be handed over between the two.
    shares_ids: bool = True
    #: Ids that mean something to one side alone, or something else to each.
    unshared: frozenset[int] = frozenset()
    #: What the draft reads in place of an unshared id.
    neutral: int = 0

    def __str__(self) -> str:
        if not self.difference:
            return "tokenizers agree"
        if self.shares_ids:
            return (
                f"tokenizers are compatible: they differ in {len(self.unshared)} added "
                f"tokens ({self.difference})"
            )
        return f"tokenizers differ: {self.difference}"


#: Of a draft that has the target's own tokenizer.
SAME = TokenizerMatch()


def compare(target: Any, draft: Any) -> TokenizerMatch:
    """How far two Hugging Face tokenizers agree.

    Rows of the models' embeddings beyond the tokenizers' vocabularies may differ.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    difference = _vocabulary_difference(ours, theirs)
    if difference and not _differ_in_added_tokens(target, draft):
        return TokenizerMatch(difference, shares_ids=False)
    if told := _encoding_difference(target, draft):
        return TokenizerMatch(difference or told, shares_ids=False)
    if not difference:
        return TokenizerMatch()
    unshared = frozenset(i for _, i in ours.items() ^ theirs.items())
    return TokenizerMatch(
        difference, unshared=unshared, neutral=_neutral(draft, unshared)
    )


def match_of(server_args: Any) -> TokenizerMatch:
    """How far the tokenizers of target and draft model agree; found once per process.

    Raises ValueError naming the flag of one that cannot be loaded.
    """
    target, draft = (
        TokenizerSource.of(server_args, of_draft=of_draft) for of_draft in (False, True)
    )
    return _match_of(target, draft)


@functools.lru_cache(1)
def _match_of(target: TokenizerSource, draft: TokenizerSource) -> TokenizerMatch:
    return compare(target.load(), draft.load())


def _differ_in_added_tokens(target: Any, draft: Any) -> bool:
    """Whether shared tokens have one id, and each other token is an added one."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if any(theirs.get(token, i) != i for token, i in ours.items()):
        return False
    return (
        ours.keys() - theirs.keys() <= target.get_added_vocab().keys()
        and theirs.keys() - ours.keys() <= draft.get_added_vocab().keys()
    )


def _encoding_difference(target: Any, draft: Any) -> str:
    for word in (SAMPLE, *SAMPLE.split()):
        a, b = (t.encode(word, add_special_tokens=False) for t in (target, draft))
        if list(a) != list(b):
            return (
                f"{word!r} is encoded as {list(a)} by the target's and as {list(b)} by "
                "the draft's"
            )
    return ""


def _vocabulary_difference(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    """The token of lowest id on which two vocabularies differ, in words."""
    tokens = {token for token, _ in ours.items() ^ theirs.items()}
    if not tokens:
        return ""
    token = min(tokens, key=lambda t: (min(v[t] for v in (ours, theirs) if t in v), t))
    return (
        f"token {token!r} is {_describe(ours.get(token))} in the target's "
        f"({len(ours)} tokens) and {_describe(theirs.get(token))} in the draft's "
        f"({len(theirs)} tokens)"
    )


def _describe(token_id: int | None) -> str:
    return "missing" if token_id is None else f"id {token_id}"


def _neutral(draft: Any, unshared: frozenset[int]) -> int:
    """A line break, which stands in for a marker, where it is one token."""
    ids = draft.encode("\n", add_special_tokens=False)
    return ids[0] if len(ids) == 1 and ids[0] not in unshared else 0
