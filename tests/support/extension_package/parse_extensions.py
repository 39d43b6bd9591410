"""A segmenter, a judge and a drafter of one's own (docs/extending.md)."""

from sglang_parse.api import Drafter, DrafterContext, DraftText, RequestRound, Round


def clause(draft: DraftText) -> list[int]:
    """A segment ends after every token with a comma, a full stop or a line break."""
    return [i + 1 for i, text in enumerate(draft.pieces) if set(text) & set(",.\n")]


class YesJudge:
    """The probability of "Yes" among all tokens, behind a question of its own."""

    name = "yes"
    question = "\n\nIs this right so far? Answer:"

    def suffix(self, tokenizer):
        self.yes = tokenizer.encode(" Yes", add_special_tokens=False)[-1]
        return tokenizer.encode(self.question, add_special_tokens=False)

    def scores(self, logits):
        return logits.float().softmax(dim=-1)[:, self.yes]


class Lookup(Drafter):
    """Copies what followed the last two tokens where they stood before."""

    name = "lookup"
    token_level = False

    def __init__(self, context: DrafterContext) -> None:
        self.vocab_size = context.vocab_size

    def draft(self, round: Round) -> None:
        for r in round:
            tokens = self.copied(r, r.room(self.name))
            r.draft = r.draft.extended(
                self.name, tokens, ended=False, token_level=self.token_level
            )

    def copied(self, r: RequestRound, room: int) -> list[int]:
        text = [*r.tokens, *r.draft.tokens]
        for at in range(len(text) - 3, -1, -1) if room else ():
            if text[at : at + 2] == text[-2:]:
                return text[at + 2 : at + 2 + room]
        return []
