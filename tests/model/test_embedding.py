"""The table: a row per id, as input and as output."""

import math

import pytest
import torch

from stack.model.embedding import Embedding


@pytest.fixture
def table():
    table = Embedding(13, 6)
    torch.nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(0))
    return table


def test_rows_by_id(table):
    ids = torch.tensor([[0, 12, 5], [5, 5, 1]])
    assert torch.equal(table.embed(ids), torch.stack([torch.stack([table.weight[i] for i in row]) for row in ids]))


def test_logits_are_inner_products_with_every_row(table):
    hidden = torch.randn(2, 3, 6)
    expected = torch.einsum("btd,vd->btv", hidden.double(), table.weight.double())
    torch.testing.assert_close(table.logits(hidden).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", ["full", "checkpoint", "fused"])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_loss_is_that_of_the_logits(table, impl, softcap):
    """One definition of a logit: what is sampled from is what was learnt, cap included."""
    table.softcap = softcap
    hidden, targets = torch.randn(2, 3, 6), torch.tensor([[0, 12, -100], [5, -100, 1]])
    expected = torch.nn.functional.cross_entropy(table.logits(hidden).flatten(0, 1), targets.flatten(), reduction="sum")
    loss = table.loss(hidden, targets, impl=impl, chunk_tokens=4, z_loss=0.0)
    torch.testing.assert_close(loss, expected)


def test_the_input_scale_moves_no_logit():
    plain, scaled = Embedding(13, 6), Embedding(13, 6, scale_input=True)
    torch.nn.init.normal_(plain.weight)
    scaled.load_state_dict(plain.state_dict())
    ids, hidden = torch.arange(13)[None], torch.randn(1, 6)
    torch.testing.assert_close(scaled.embed(ids), plain.embed(ids) * math.sqrt(6))
    assert torch.equal(scaled.logits(hidden), plain.logits(hidden))
