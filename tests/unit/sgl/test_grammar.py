"""Grammars along a draft, with SGLang's own backends and the embedded tokenizer."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from transformers import AutoTokenizer

from sglang_parse.drafting.model_drafter import ModelDrafter, ModelMemory
from sglang_parse.embedded import TARGET_PATH
from sglang_parse.engine.shown import resume_draft
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round_records import RequestRound
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl.grammar import GrammarChain, mask_for_rows

TOKENIZER = AutoTokenizer.from_pretrained(TARGET_PATH)
VOCAB = len(TOKENIZER)
CPU = torch.device("cpu")


def make_backend(name):
    if name == "xgrammar":
        from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

        eos = [TOKENIZER.eos_token_id]
        return XGrammarGrammarBackend(TOKENIZER, VOCAB, model_eos_token_ids=eos)
    from sglang.srt.constrained.llguidance_backend import GuidanceBackend

    return GuidanceBackend(TOKENIZER, n_vocab=VOCAB)


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request):
    return make_backend(request.param)


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def allowed(mask, grammar):
    """Token ids that a mask row leaves."""
    logits = torch.zeros(1, VOCAB)
    grammar.apply_vocab_mask(logits=logits, vocab_mask=mask)
    return {int(t) for t in (logits[0] == 0).nonzero()}


def chain_of(backend, regex):
    return GrammarChain(backend.dispatch_regex(regex), VOCAB, CPU)


def test_mask_is_as_wide_as_the_draft_models_logits(backend):
    """Red if a draft with fewer padded rows than the target gets a mask that kernels
    on a GPU refuse (bitmask_ops.py), or loses what it masks."""
    chain = GrammarChain(backend.dispatch_regex("Step [0-9]"), VOCAB, CPU)
    widths = []
    move = chain.grammar.move_vocab_mask

    def noted(mask, device):
        widths.append(mask.shape[1])
        return move(mask, device)

    chain.grammar.move_vocab_mask = noted
    for width in (VOCAB, VOCAB - 40):
        logits = torch.zeros(1, width)
        chain.mask_next(logits)
        expected = {t for t in allowed(chain.masks[0], chain.grammar) if t < width}
        assert {int(t) for t in (logits[0] == 0).nonzero()} == expected
    assert widths == [-(-VOCAB // 32), -(-(VOCAB - 40) // 32)]


def test_text_is_walked_up_to_the_first_token_that_breaks_the_grammar(backend):
    """Red if a text that nobody masked is drafted without masks behind its tokens."""
    chain = chain_of(backend, "Step [0-9]: [a-z ]+")
    tokens = ids("Step 1: so we go")
    assert chain.walk(tokens) == len(tokens)
    assert len(chain.masks) == len(tokens) + 1
    other = chain_of(backend, "Step [0-9]: [a-z ]+")
    broken = [*ids("Step 1: so"), *ids("\n"), *ids(" we")]
    assert other.walk(broken) == len(ids("Step 1: so"))
    assert len(other.masks) == len(ids("Step 1: so")) + 1


def test_masks_behind_a_walk_are_those_of_the_grammar_there(backend):
    chain = chain_of(backend, "Step [0-9]: [a-z ]+")
    tokens = ids("Step 1: so we go")
    chain.walk(tokens)
    direct = chain_of(backend, "Step [0-9]: [a-z ]+")
    for mask, token in zip(chain.masks, tokens, strict=False):
        mine = allowed(mask, chain.grammar)
        assert mine == allowed(direct._fill(), direct.grammar) and token in mine
        direct.grammar.accept_token(token)
    rows = mask_for_rows([None, chain], [0, 1, 1], [0, 0, len(tokens)])
    assert allowed(rows.vocab_mask[:1], chain.grammar) == set(range(VOCAB))
    for row, mask in ((1, chain.masks[0]), (2, chain.masks[-1])):
        row_mask = rows.vocab_mask[row : row + 1]
        assert allowed(row_mask, chain.grammar) == allowed(mask, chain.grammar)


def test_draft_past_the_end_of_the_grammar_takes_no_committed_token_back(backend):
    """Red if steps behind the end, which no grammar counts, are rolled back too
    (`ignore_eos` drafts on behind the end token)."""
    grammar = backend.dispatch_regex("Step [0-9]")
    first, *rest = ids("Step 1")
    grammar.accept_token(first)  # committed
    chain = GrammarChain(grammar, VOCAB, CPU)
    before = allowed(chain.masks[0], grammar)
    for token in [*rest, TOKENIZER.eos_token_id, *ids("Step 1 and more")]:
        chain.advance(token)
    chain.rewind()
    assert allowed(GrammarChain(grammar, VOCAB, CPU).masks[0], grammar) == before
    for token in rest:
        grammar.accept_token(token)


@pytest.mark.parametrize("rule", ['"Step" x', "x"])
def test_a_rule_that_never_ends_ends_the_draft(rule):
    """Red if a draft goes where the grammar allows nothing more: the mask behind it is
    empty, its tokens are refused, and what the draft loop raises stops the server."""
    backend = make_backend("xgrammar")
    grammar = backend.dispatch_ebnf(f'root ::= {rule}\nx ::= x "b"')
    chain = GrammarChain(grammar, VOCAB, CPU)
    good = 0
    for token in ids("Step"):
        if chain.is_dead or not chain.advance(token):
            break
        good += 1
    assert good < len(ids("Step"))
    assert len(chain.masks) == good + 1
    chain.rewind()
    again = GrammarChain(grammar, VOCAB, CPU)
    assert torch.equal(again.masks[0], chain.masks[0])


def test_text_behind_the_end_of_the_grammar_is_not_drafted(backend):
    chain = chain_of(backend, "Step [0-9]")
    tokens = [*ids("Step 1"), TOKENIZER.eos_token_id]
    assert chain.walk([*tokens, *ids(" and")]) == len(tokens)


@pytest.mark.parametrize("window", [0, 2, 100])
def test_pending_text_is_cut_where_the_grammar_ends_it(backend, window):
    """Red if the target is asked behind pending tokens that the grammar refuses, or a
    draft is taken to be whole of which a part was cut."""
    text, num_good = broken_text()
    bound = pending_request(chain_of(backend, "Step [0-9]: [a-z ]+"), text, window)
    free = pending_request(None, text, window)
    num = min(window, num_good)
    assert bound.draft.tokens == tuple(text[:num]) and bound.draft.num_client == num
    assert not bound.draft.ended and len(bound.grammar.masks) == num + 1
    assert free.draft.tokens == tuple(text[:window])
    assert free.draft.ended == (window == 100)


def test_nothing_is_drafted_in_place_of_what_a_grammar_cut(backend):
    """Red if the draft model gets more steps than were planned, those of the part that
    a grammar cut too."""
    text, num_good = broken_text()
    chain = chain_of(backend, "Step [0-9]: [a-z ]+")
    drafter = ModelDrafter(SimpleNamespace(reach=999))
    drafter.slots = SimpleNamespace(table=torch.zeros(2, 9))
    for grammar, held in ((chain, num_good), (None, len(text))):
        r = pending_request(grammar, text, len(text) + 3, ended=False)
        r.budgets = {"model": r.window}
        drafter._memory[r.state] = ModelMemory(0, 0)
        order = drafter._order(0, r, drafter._num_new(r))
        assert order.num_new == 3 and len(order.tokens) == 2 + held


def broken_text() -> tuple[list[int], int]:
    """A text that breaks the grammar "Step [0-9]: [a-z ]+", and behind how many
    tokens."""
    good = ids("Step 1: so")
    return [*good, *ids("\n"), *ids(" we")], len(good)


def pending_request(grammar, text, window: int, *, ended: bool = True) -> RequestRound:
    state = RequestState(None, frozenset(), None, report=None)
    state.draft = Draft(tuple(text), ended, num_client=len(text))
    req = SimpleNamespace(origin_input_ids=[1], output_ids=[2])
    r = RequestRound(req, state, 0, 5, 2, output_len=1, grammar=grammar, window=window)
    resume_draft(r)
    return r


def test_strict_thinking_runs_on_no_cpu():
    """Red if SGLang can filter tokens of thinking on a CPU: then the flag, which is
    refused because no test can prove it, is to be tested."""
    assert not make_backend("llguidance").is_support_token_filter
    backend = make_backend("xgrammar")
    mask = backend.allocate_vocab_mask(VOCAB, 1, CPU)
    with pytest.raises(RuntimeError, match="Unsupported device: cpu"):
        backend.apply_vocab_mask(torch.zeros(1, VOCAB), mask)


def thinking(grammar) -> tuple[int, ...]:
    """Where a grammar is that begins behind thinking."""
    names = "tokens_in_think", "tokens_after_end", "_matched_think_end_tokens"
    return tuple(getattr(grammar, name) for name in names)


@pytest.mark.parametrize("budget", [-1, 9])
@pytest.mark.parametrize("text", ["so it</think>So 3", "</think>So 3\n", "x" * 12])
def test_masks_across_the_end_of_thinking(backend, text, budget):
    """Red if a grammar that begins behind thinking, or a budget of thinking, masks a
    draft that crosses it otherwise than single tokens, or is not taken back."""

    def made():
        can_filter = backend.is_support_token_filter
        filters = {"token_filter_fn": backend.set_token_filter} if can_filter else {}
        grammar = ReasonerGrammarObject(
            backend.dispatch_regex("So [0-9]"),
            ids("</think>"),
            max_think_tokens=budget,
            enable_token_filter=can_filter,
            **filters,
        )
        grammar.maybe_init_reasoning(True)
        return GrammarChain(grammar, VOCAB, CPU)

    tokens = ids(text)
    chain, one_by_one = made(), made()
    num = chain.walk(tokens)
    is_cut = "x" in text and budget > 0 and backend.is_support_token_filter
    assert num == (budget if is_cut else len(ids(text.removesuffix("\n"))))
    chain.rewind()
    for k, (token, mask) in enumerate(zip(tokens[:num], chain.masks, strict=False)):
        assert torch.equal(mask, one_by_one.masks[-1])
        for end in range(k, num + 1):
            # A draft that is cut there, in thinking, in its end or behind it.
            cut = GrammarChain(chain.grammar, VOCAB, CPU)
            assert cut.walk(tokens[k:end]) == end - k
            cut.rewind()
            assert thinking(chain.grammar) == thinking(one_by_one.grammar)
            assert torch.equal(chain._fill(), mask)
        for grammar in (chain.grammar, one_by_one.grammar):
            grammar.accept_token(token)
        one_by_one.masks.append(one_by_one._fill())
    assert torch.equal(chain.masks[-1], chain._fill())
