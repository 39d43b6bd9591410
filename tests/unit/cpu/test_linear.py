"""Packed weights: the same products as torch's, and never old ones."""

from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.nn.functional import linear

from sglang_parse.cpu import linear as module
from sglang_parse.cpu.linear import multiply, packed_weight, padded_rows

SIZE = 512  # in and out: 262,144 elements, more than MIN_ELEMENTS

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)
pytestmark = needs_onednn


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return torch.nn.Parameter(torch.randn(SIZE, SIZE), requires_grad=False)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 16, 17, 31, 255, 257, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_torchs(weight, rows, has_bias):
    """Red if rows are lost in rounding their number up, or a bias is."""
    x = torch.randn(rows, SIZE)
    bias = torch.randn(SIZE) if has_bias else None
    found = multiply(x, packed_weight(weight, x), bias)
    expected = linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-4)


def test_a_row_has_the_same_product_in_every_batch(weight):
    """Red if a request's logits depend on who is in the batch with it by more than
    the rounding of a processor that was never seen here."""
    x = torch.randn(64, SIZE)
    packed = packed_weight(weight, x)
    whole = multiply(x, packed)
    for num in (1, 2, 3, 7, 16, 17, 40):
        torch.testing.assert_close(
            multiply(x[:num], packed), whole[:num], atol=2e-5, rtol=1e-5
        )


def test_views_and_further_dimensions_are_kept(weight):
    """Red if a slice of a wider tensor is read as if it were whole."""
    x = torch.randn(3, 5, 2 * SIZE)[..., :SIZE]
    found = multiply(x, packed_weight(weight, x))
    assert found.shape == (3, 5, SIZE)
    torch.testing.assert_close(found, linear(x, weight), atol=2e-4, rtol=1e-4)


def test_few_row_numbers_are_compiled():
    """Red if each number of rows gets a kernel of its own."""
    numbers = {padded_rows(num) for num in range(4097)}
    assert len(numbers) <= 170
    assert all(num <= padded_rows(num) <= 1.5 * num for num in range(17, 4097))
    assert [padded_rows(num) for num in (0, 1, 16)] == [0, 1, 16]


@pytest.mark.parametrize("x_type", [torch.bfloat16, torch.float16])
def test_other_precisions_are_torchs(weight, x_type):
    assert packed_weight(weight.to(x_type), torch.ones(1, SIZE, dtype=x_type)) is None


def test_small_weights_are_torchs():
    assert packed_weight(torch.ones(64, 64), torch.ones(1, 64)) is None


def test_without_memory_weights_stay_as_they_are(weight, monkeypatch, caplog):
    """Red if packing takes the last of the memory, or does not say so."""
    free = SimpleNamespace(available=module.RESERVE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    assert packed_weight(weight, torch.ones(1, SIZE)) is None
    assert "stays unpacked" in caplog.text


@pytest.mark.usefixtures("plugins")
def test_a_layer_serves_the_weights_that_were_loaded_last(weight):
    """Red if an update of weights leaves the packed ones of before."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    layer = torch.nn.Module()
    layer.weight = weight
    method = UnquantizedLinearMethod()
    x = torch.randn(4, SIZE)
    assert torch.equal(method.apply(layer, x), multiply(x, packed_weight(weight, x)))
    layer.weight.data.copy_(torch.eye(SIZE))
    method.process_weights_after_loading(layer)
    torch.testing.assert_close(method.apply(layer, x), x)


@pytest.mark.usefixtures("plugins")
def test_the_lm_head_is_packed_too(weight):
    """Red if the vocabulary is multiplied by torch, or a LoRA on it is passed over."""
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod

    processor = LogitsProcessor.__new__(LogitsProcessor)
    torch.nn.Module.__init__(processor)
    processor.use_fp32_lm_head = False
    processor.use_fp32_lm_head_output = False
    processor.rl_on_policy_target = None
    head = torch.nn.Module()
    head.weight, head.quant_method = weight, UnquantizedEmbeddingMethod()
    x = torch.randn(4, SIZE)
    expected = multiply(x, packed_weight(weight, x))
    assert torch.equal(processor._compute_lm_head(x, head), expected)
    weight.data.copy_(torch.eye(SIZE))
    head.quant_method.process_weights_after_loading(head)
    torch.testing.assert_close(processor._compute_lm_head(x, head), x)
    head.set_lora = head.apply_lora = lambda *_: None
    head.forward = lambda states: states + 1
    assert torch.equal(processor._compute_lm_head(x, head), x + 1)
