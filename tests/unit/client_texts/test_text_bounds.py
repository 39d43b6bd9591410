"""What a client is told whose text or question does not fit."""

import pytest

from sglang_parse.client_texts.client_drafts import Bounds, _refuse_length
from sglang_parse.requests.refusal import Refusal

BOUNDS = Bounds(context_len=2048, num_free=1000, num_slots=1000, max_rows=2048)


@pytest.mark.parametrize(
    ("num", "suffix_len", "told"),
    [(900, 20, "shorten it."), (10, 2000, "parse_judge_suffix (2000 tokens).")],
)
def test_the_longer_of_text_and_question_is_to_be_shortened(num, suffix_len, told):
    """Red if the sender of a long question is told to shorten a short text."""
    with pytest.raises(Refusal, match="shorten") as refusal:
        _refuse_length(num, 5, BOUNDS, suffix_len=suffix_len)
    assert str(refusal.value).endswith(told)
