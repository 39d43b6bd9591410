"""Chains and trees of an EAGLE-3 head, as `benchmarks/head_shapes` drafts them."""

import math

import pytest
import torch

from benchmarks.head_shapes.__main__ import MOST, Shapes
from benchmarks.head_shapes.drafts import Chains, TextDrafts, Trees
from benchmarks.train_pair.head import Eagle3Head, target_states
from benchmarks.train_pair.model import ModelConfig, TinyLlama
from benchmarks.train_pair.train_head import HeadBatch, accept_length, accepted

VOCAB, LENGTH = 5, 80  # few tokens, so that a random head is right at times


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(1)
    target = TinyLlama(ModelConfig(VOCAB, 8))
    head = Eagle3Head(target)
    ids = torch.randint(VOCAB, (LENGTH,))
    with torch.no_grad():
        features = target_states(target, ids[None])[0][0]
        return TextDrafts(head, ids, features), head, ids, features


def test_chains_are_those_of_the_training(case):
    """Red if a drafted row sees another row, position or token than a server's does."""
    drafts, head, ids, features = case
    with torch.no_grad():
        chains = Chains.of(drafts, 4)
    batch = HeadBatch(
        ids[None], features[None], None, torch.tensor([1]), torch.tensor([LENGTH])
    )
    counts = accepted(head, batch, 4)[0]
    assert chains.right.sum(1).tolist()[: LENGTH - 2] == counts.tolist()[: LENGTH - 2]
    assert int(counts.max()) >= 2


def test_a_tree_of_one_path_is_the_chain(case):
    """Red if a level goes on from another row than its likeliest."""
    drafts, *_ = case
    with torch.no_grad():
        chains, trees = Chains.of(drafts, 4), Trees.of(drafts, 1, 4)
    assert trees.right(4).tolist() == chains.right.sum(1).tolist()
    torch.testing.assert_close(trees.sums, chains.sums)


def test_a_whole_tree_has_every_path(case):
    """Red if a path is lost or found where its parents are not, or a small tree lacks
    what is likelier."""
    drafts, _, ids, _ = case
    with torch.no_grad():
        trees = Trees.of(drafts, VOCAB, 2)
    everything = trees.right(VOCAB + VOCAB**2)[: LENGTH - 3]
    assert everything.tolist() == [2] * (LENGTH - 3)
    first = drafts.log_probs(drafts.roots).argmax(1)[: LENGTH - 2] == ids[2:]
    assert (trees.right(1)[: LENGTH - 2] == first).all()
    sizes = [int(trees.right(n).sum()) for n in (1, 3, 9, 30)]
    assert sizes == sorted(sizes)


def test_what_stands_beside_a_chain_is_right_where_the_chain_is_not(case):
    """Red if a token beside the chain stands in another place, or counts although the
    chain is right."""
    drafts, *_ = case
    with torch.no_grad():
        chains = Chains.of(drafts, 4)
    counts = chains.right.sum(1)
    right, rows, steps = chains.with_others(1e-9)
    # All tokens of the vocabulary stand there; behind the text there is none.
    inside = slice(0, LENGTH - 6)
    assert (right == (counts + 1).clamp(max=4))[inside].all()
    assert (rows == 4 * VOCAB).all() and (steps == 3).all()
    alone, few, _ = chains.with_others(1.0)
    assert (few == 1).all() and (alone == counts.clamp(max=1)).all()


def test_rounds_are_those_of_accept_length(case):
    """Red if rounds through a text are counted otherwise than for the shipped head."""
    drafts, head, ids, features = case
    shapes = Shapes()
    with torch.no_grad():
        shapes.add(drafts, 5, LENGTH)
    batch = HeadBatch(
        ids[None], features[None], None, torch.tensor([5]), torch.tensor([LENGTH])
    )
    expected = accept_length(head, [batch], 4)
    found = shapes.figures["chain 4"]
    assert (found.passes, found.tokens) == (expected["rounds"], expected["tokens"])
    assert found.told()["rows"] == 4 and found.told()["steps"] == 3
    surest, loosest = (shapes.figures[f"cutoff {c}"].told() for c in (0.9, 0.05))
    assert 1 <= surest["rows"] <= loosest["rows"] <= MOST
    assert math.isclose(surest["rows"], surest["steps"] + 1, abs_tol=2e-3)
