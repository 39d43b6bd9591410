"""How far two tokenizers agree."""

import pytest
from tokenizers import AddedToken, pre_tokenizers

from sglang_parse.drafting.vocabularies import compare
from tests.unit.judging.test_prompt import CHATML, build_tokenizer


def test_same_tokenizer_passes_whatever_its_chat_template():
    """Red if the same tokenizer is taken for another."""
    agreement = compare(build_tokenizer(CHATML), build_tokenizer(None))
    assert agreement.shares_ids and not agreement.difference
    assert not agreement.unshared and str(agreement) == "tokenizers agree"


def test_added_tokens_of_one_side_are_set_apart():
    """Red if a draft writes a marker that the target does not know, or reads one that
    it does not know itself."""
    plain = build_tokenizer()
    n = len(plain)
    more = build_tokenizer(extra=["<tool>", AddedToken("<think2>", special=True)])
    for pair in ((more, plain), (plain, more)):
        agreement = compare(*pair)
        assert agreement.shares_ids and agreement.unshared == {n, n + 1}
        assert "'<tool>' is" in agreement.difference
        assert agreement.neutral == plain.encode("\n")[0]


def test_an_id_that_is_another_added_token_to_each_is_set_apart():
    """Red if a tool's marker of the target is read as another marker of the draft."""
    ours, theirs = build_tokenizer(extra=["<a>"]), build_tokenizer(extra=["<b>"])
    agreement = compare(ours, theirs)
    assert agreement.shares_ids and agreement.unshared == {len(ours) - 1}


def test_missing_word_is_named():
    """Red if words of one side alone pass for added tokens."""
    agreement = compare(build_tokenizer(words="Yes No Sure"), build_tokenizer())
    assert not agreement.shares_ids
    assert "missing in the draft's (" in agreement.difference


def test_token_with_other_id_is_named():
    """Red if ids are handed over that mean something else."""
    ours = build_tokenizer(extra=["<a>", "<b>"])
    theirs = build_tokenizer(extra=["<b>", "<a>"])
    n = len(ours)
    agreement = compare(ours, theirs)
    assert not agreement.shares_ids
    assert f"'<a>' is id {n - 2} in" in agreement.difference
    assert f"id {n - 1} in the draft's" in agreement.difference


@pytest.mark.parametrize("extra", [(), ("<tool>",)])
def test_other_encoding_of_same_vocabulary_is_named(extra):
    """Red if a text has other ids in the draft's eyes and nobody notices."""
    ours, theirs = build_tokenizer(), build_tokenizer(extra=extra)
    digits = pre_tokenizers.Split("e", "isolated")
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    agreement = compare(ours, theirs)
    assert not agreement.shares_ids
    assert ("'<tool>'" if extra else "is encoded as") in agreement.difference
