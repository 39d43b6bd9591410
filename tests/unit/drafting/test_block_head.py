"""Which block drafts are refused, before they change anything of the target."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_parse.drafting import block_head
from sglang_parse.drafting.block_head import BlockHead, DFlashDraftModel
from sglang_parse.drafting.head_model import HeadModel


@pytest.fixture
def refusal(monkeypatch, tmp_path):
    """What the sentence says of a draft with changed fields of its configuration."""

    def ask(kind=DFlashDraftModel, **changed):
        fields = {"mask_token_id": 3, "target_layer_ids": [0, 2], **changed}
        config = SimpleNamespace(block_size=8, dflash_config=fields)
        model = kind.__new__(kind)

        def load(self, context, **_):
            self.model = model
            self.runner = SimpleNamespace(
                model_config=SimpleNamespace(hf_config=config)
            )

        monkeypatch.setattr(HeadModel, "__init__", load)
        monkeypatch.setattr(block_head, "show_layers", pytest.fail)
        target = SimpleNamespace(vocab_size=64, num_hidden_layers=4)
        context = SimpleNamespace(
            target=SimpleNamespace(model_config=target),
            config=SimpleNamespace(eagle_model_path=str(tmp_path)),
        )
        with pytest.raises(ValueError, match="eagle-model-path is") as caught:
            BlockHead(context)
        assert "expected a dflash draft with a mask_token_id below 64" in str(
            caught.value
        )
        return str(caught.value)

    return ask


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"mask_token_id": None}, "which has mask_token_id None"),
        ({"mask_token_id": 64}, "which has mask_token_id 64"),
        ({"target_layer_ids": [2, 0]}, r"which reads layers [2, 0]"),
        ({"target_layer_ids": [1, 3]}, r"which reads layers [1, 3]"),
        ({"kind": block_head.Qwen3DSparkModel}, "which has a draft of another kind"),
    ],
)
def test_what_cannot_be_served_is_refused(refusal, changed, told):
    """Red if such a draft is served, with nonsense or an error in a prefill."""
    assert told in refusal(**changed)


def test_a_trained_mask_embedding_is_refused(refusal, tmp_path):
    """Red if a draft that needs another embedding of the mask is served without it."""
    (tmp_path / block_head.MASK_EMBEDDING).touch()
    assert "which has a mask_embedding.pt" in refusal()
