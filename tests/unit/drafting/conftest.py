"""Drafting on one rank, greedily."""

from contextlib import nullcontext

import pytest

from sglang_parse.drafting import draft_model, head_model
from tests.support.counting import GREEDY


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    for module in (draft_model, head_model):
        monkeypatch.setattr(module, "draft_tp_context", lambda _: nullcontext())
        monkeypatch.setattr(module, "draft_pp_context", nullcontext)
    monkeypatch.setattr(draft_model, "draft_rows", lambda *_: GREEDY)
