"""The decoder against ``transformers``' Qwen3 and Llama, plain references for what they lack, and laws 4 and 10."""

import functools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from hugging_face import same_shape
from torch.utils.checkpoint import checkpoint as recomputed

from stack.config import schema as config
from stack.config.arguments import CONF
from stack.model.attention import Segments
from stack.model.decoder import Decoder, Loss
from stack.model.embedding import OUTPUT, row_parameters_of

SMALL = config.Model(3, 48, 4, 2, 16, 80, 128, 10000.0, 1e-6, True, 0.1, False, None, False)
ROWS = 96
CPU = torch.device("cpu")


def shape(name: str) -> config.Model:
    return config.Model(**yaml.safe_load((Path(CONF) / "model" / f"{name}.yaml").read_text()))


def alone(ids):
    """Positions and segments of whole sequences."""
    size, length = ids.shape
    return torch.arange(length).expand(size, length), Segments(((length,),) * size, length, CPU)


def twin(model: Decoder):
    """A Hugging Face model with the same weights, taken by name; its norms are 1 nowhere."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(
                    1 + 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                )
    other = same_shape(model.config, model.table.weight.shape[0])
    missing, unexpected = other.load_state_dict(model.state_dict(), strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    other.tie_weights()
    return other


@pytest.mark.parametrize("qk_norm", [True, False], ids=["qwen3", "llama"])
def test_logits_and_gradients_equal_transformers(qk_norm):
    model = Decoder(replace(SMALL, qk_norm=qk_norm), ROWS, seed=1)
    other = twin(model)
    ids = torch.randint(0, ROWS, (2, 128), generator=torch.Generator().manual_seed(0))
    theirs = other(ids).logits
    assert (model.logits(ids) - theirs).abs().max() < 1e-4
    assert theirs.std() > 0.5, "logits so small that anything would be near"

    targets = ids.roll(-1, 1)
    loss = model(ids, *alone(ids), targets, Loss("fused", 50))
    reference_loss = F.cross_entropy(theirs.flatten(0, 1), targets.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(reference_loss.item(), rel=1e-6)
    loss.backward()
    reference_loss.backward()
    theirs_by_name = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        expected = theirs_by_name[name].grad
        assert (parameter.grad - expected).norm() < 1e-4 * expected.norm(), name


def test_the_real_shape_equals_transformers():
    """All 30 layers of ``model=stack_100m``, with few rows; a block at the start is not the identity here."""
    model = Decoder(replace(shape("stack_100m"), zero_init=False), 512)
    other = twin(model)
    ids = torch.randint(0, 512, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (model.logits(ids) - other(ids).logits).abs().max() < 1e-4


def test_parameters_of_the_real_run():
    with torch.device("meta"):
        model = Decoder(shape("stack_100m"), 32768)
    assert sum(p.numel() for p in model.parameters()) == 101_353_728
    assert model.table.weight.numel() == 16_777_216


def test_names_are_those_of_hugging_face():
    """The tied head has no name of its own."""
    with torch.device("meta"):
        ours, theirs = Decoder(SMALL, ROWS), same_shape(SMALL, ROWS)
    assert {n: p.shape for n, p in ours.state_dict().items()} == {n: p.shape for n, p in theirs.named_parameters()}


# Law 4: one table.


def test_the_tables_gradient_is_the_sum_of_its_two_paths():
    """Against an untied Hugging Face model in float64, where each use of the table has a tensor of its own."""
    model = Decoder(SMALL, ROWS, seed=2)
    ids = torch.randint(0, ROWS, (2, 32), generator=torch.Generator().manual_seed(0)) // 2  # upper ids are never input
    targets = torch.randint(0, ROWS, (2, 32), generator=torch.Generator().manual_seed(1))
    model(ids, *alone(ids), targets, Loss("fused", 10)).backward()

    other = twin(Decoder(SMALL, ROWS, seed=2)).double()
    other.load_state_dict({**model.state_dict(), "lm_head.weight": model.table.weight.detach()})
    other.lm_head.weight = torch.nn.Parameter(other.lm_head.weight.detach().clone())
    F.cross_entropy(other(ids).logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    sparse, dense = other.model.embed_tokens.weight.grad, other.lm_head.weight.grad
    assert not sparse[ROWS // 2 :].any() and sparse[ids.unique()].any(-1).all() and dense.any(-1).all()
    assert (model.table.weight.grad - (sparse + dense)).norm() < 1e-5 * (sparse + dense).norm()


def test_embedding_and_head_stay_one_parameter():
    model = Decoder(SMALL, ROWS)
    assert [n for n, p in model.named_parameters() if p.shape[0] == ROWS] == ["model.embed_tokens.weight"]
    before = model.table.weight
    model.load_state_dict({n: t + 1 for n, t in model.state_dict().items()})
    model.compile_blocks()
    assert model.table.weight is before
    with torch.no_grad():
        model.table.weight[5] = 0  # one write is seen by both uses
    assert not model.table.embed(torch.tensor([[5]])).any()
    assert not model.table.logits(torch.randn(1, SMALL.d))[0, 5]


# Law 10: angles in float32, GEMMs in bfloat16 where the run says so.


def test_angles_are_float32_under_autocast_at_the_last_position():
    model = Decoder(replace(shape("stack_100m"), layers=1), ROWS)
    positions = torch.tensor([[0, 1, 2047]])
    with torch.autocast("cpu", torch.bfloat16):
        cos, sin = model.angles(positions)
    assert cos.dtype == sin.dtype == torch.float32
    half = model.config.head_dim // 2
    exact = positions.double()[..., None, None] * 10000.0 ** -(torch.arange(half).double() / half)
    assert (cos.double() - exact.cos()).abs().max() < 3e-4 and (sin.double() - exact.sin()).abs().max() < 3e-4
    cast = exact.float().bfloat16().float()  # what a cast would have made of them
    assert (cast.cos() - exact.cos()).abs().max() > 0.5


def test_far_positions_stay_exact_under_autocast():
    """What the angles are used for is float32, too: queries at position 2047 turn as in float64."""
    from stack.model.layers import rotate

    model = Decoder(replace(shape("stack_100m"), layers=1), ROWS)
    x = torch.randn(1, 2, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    positions = torch.tensor([[2046, 2047]])
    with torch.autocast("cpu", torch.bfloat16):
        turned = rotate(x, *model.angles(positions))
    angle = positions.double()[..., None, None] * 10000.0 ** -(torch.arange(32).double() / 32)
    pairs = torch.complex(x.double()[..., :32], x.double()[..., 32:]) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((pairs.real, pairs.imag), -1)
    assert turned.dtype == torch.bfloat16
    assert ((turned.double() - expected).abs() <= 2**-8 * expected.abs() + 2e-3).all()


def test_autocast_keeps_parameters_gradients_and_loss_in_float32():
    model = Decoder(SMALL, ROWS)
    ids = torch.randint(0, ROWS, (2, 16), generator=torch.Generator().manual_seed(0))
    seen = []
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *a: seen.append(a[2].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, *alone(ids), ids, Loss("fused", 5))
    loss.backward()
    assert seen == [torch.bfloat16] and loss.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    exact = model(ids, *alone(ids), ids, Loss("full"))
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)


# Initialization.


@pytest.mark.parametrize("zero_init", [True, False])
def test_initialization(zero_init):
    model = Decoder(replace(shape("laptop"), zero_init=zero_init), 1024, seed=3)
    small = 0.0 if zero_init else 0.02 / math.sqrt(2 * 4)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert p.eq(1).all(), name
            continue
        std = small if "o_proj" in name or "down_proj" in name else 0.02
        # The standard error of a mean is std / sqrt(n), that of a standard deviation std / sqrt(2 n).
        assert abs(p.mean()) <= 5 * std / math.sqrt(p.numel()), name
        assert abs(p.std() - std) <= 5 * std / math.sqrt(2 * p.numel()), name


def test_a_seed_repeats_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    a, b, c = (Decoder(SMALL, ROWS, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])


def test_blocks_that_start_at_zero_are_the_identity():
    """Then the first loss is that of the table alone, about ``ln V``."""
    model = Decoder(replace(SMALL, zero_init=True, init_std=0.02), ROWS)
    ids = torch.randint(0, ROWS, (2, 16), generator=torch.Generator().manual_seed(0))
    hidden = model.hidden(ids, *alone(ids))
    torch.testing.assert_close(hidden, model.model.norm(model.table.embed(ids)))
    loss = model(ids, *alone(ids), ids.roll(-1, 1), Loss()) / ids.numel()
    assert loss.item() == pytest.approx(math.log(ROWS), abs=0.2)


# What no stock architecture has.


def test_scaled_input_and_softcap():
    c = replace(SMALL, scale_input=True, softcap=3.0)
    model, plain = Decoder(c, ROWS, seed=1), Decoder(SMALL, ROWS, seed=1)
    assert c.native_only and not SMALL.native_only
    ids = torch.randint(0, ROWS, (2, 16), generator=torch.Generator().manual_seed(0))
    logits = model.logits(ids)
    embed = plain.table.embed
    plain.table.embed = lambda ids: embed(ids) * math.sqrt(c.d)
    raw = plain.logits(ids)
    torch.testing.assert_close(logits, 3.0 * torch.tanh(raw / 3.0))
    assert logits.abs().max() < 3.0 < raw.abs().max()
    loss = model(ids, *alone(ids), ids, Loss("fused", 7, 1e-3))
    expected = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")
    expected += 1e-3 * torch.logsumexp(logits, -1).square().sum()
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("impl", ["full", "checkpoint"])
def test_every_loss_gives_the_same_gradients(impl):
    ids = torch.randint(0, ROWS, (2, 16), generator=torch.Generator().manual_seed(0))
    model = Decoder(SMALL, ROWS)
    found = []
    for loss in (Loss("fused", 5, 1e-4), Loss(impl, 3, 1e-4)):
        value = model(ids, *alone(ids), ids, loss)
        found.append((value, *torch.autograd.grad(value, list(model.parameters()))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_compiled_blocks_equal_uncompiled_ones():
    model, compiled = (Decoder(replace(SMALL, layers=2), ROWS, seed=1) for _ in range(2))
    compiled.compile_blocks()
    ids = torch.randint(0, ROWS, (2, 16), generator=torch.Generator().manual_seed(0))
    losses = []
    for m in (model, compiled):
        losses.append(m(ids, *alone(ids), ids, Loss()))
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for (name, a), b in zip(model.named_parameters(), compiled.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-5 * a.grad.norm(), name
    assert model.state_dict().keys() == compiled.state_dict().keys()


def test_a_block_is_computed_by_its_forward():
    """What wraps modules (FSDP2, activation checkpointing) hooks their forward; recomputed, the bits are the same."""
    model, ids = Decoder(SMALL, ROWS, seed=1), torch.randint(0, ROWS, (2, 128))
    inputs, calls = (ids, *alone(ids), ids.roll(-1, 1), Loss("fused", 50)), []
    handles = [block.register_forward_hook(lambda *_: calls.append(1)) for block in model.model.layers]
    model(*inputs).backward()
    assert len(calls) == SMALL.layers
    for handle in handles:
        handle.remove()
    kept = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for block in model.model.layers:
        block.forward = functools.partial(recomputed, block.forward, use_reentrant=False)
    model(*inputs).backward()
    assert all(torch.equal(p.grad, kept[name]) for name, p in model.named_parameters())


def test_the_table_names_what_has_rows():
    model = Decoder(SMALL, ROWS)
    (rows,) = model.row_parameters()
    assert rows.role == "both" and rows.tensor is model.state_dict(keep_vars=True)[rows.name]
    assert [(row.name, row.role) for row in row_parameters_of(model.state_dict())] == [(rows.name, "both")]
    untied = model.state_dict() | {OUTPUT: rows.tensor.detach() + 1}
    assert [(row.name, row.role) for row in row_parameters_of(untied)] == [(rows.name, "input"), (OUTPUT, "output")]
