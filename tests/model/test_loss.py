"""The chunked losses against plain autograd in float64, and what they promise about memory and bfloat16."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from stack.model.loss import linear_cross_entropy

IMPLS = ("full", "checkpoint", "fused")
CASES = [(i, r) for i in IMPLS for r in ("sum", "mean", "none") if (i, r) != ("fused", "none")]  # that one is refused
CHUNKS = (1, 2, 3, 7, 100)


def plain(hidden, weight, targets, z=0.0, cap=None):
    """The loss of each token, written down from its definition."""
    logits = hidden @ weight.T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    lse = torch.logsumexp(logits, -1)
    supervised = targets != -100
    own = logits.gather(-1, targets.where(supervised, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(supervised, lse - own + z * lse.square(), 0)


def reduce(losses, targets, reduction):
    if reduction == "none":
        return losses
    return losses.sum() / (1 if reduction == "sum" else (targets != -100).sum().clamp(min=1))


def example(tokens=7, width=5, rows=11, ignored=(2, 5), dtype=torch.float64, seed=0, shape=None):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, rows, (tokens,), generator=generator)
    targets[list(ignored)] = -100
    if shape is not None:
        hidden, targets = hidden.view(*shape, width), targets.view(shape)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def gradients(value, *inputs, upstream=None):
    return torch.autograd.grad(value, inputs, upstream)


@pytest.fixture(params=["left out", "counted as 0"])
def ignored_positions(request, monkeypatch):
    """What becomes of positions without a target: a CPU leaves them out, a GPU counts their loss as 0."""
    if request.param == "counted as 0":
        monkeypatch.setattr("stack.model.loss._scored", lambda supervised: None)


@pytest.mark.usefixtures("ignored_positions")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("z, cap", [(0.0, None), (1e-2, None), (0.0, 2.0), (1e-2, 2.0)])
@pytest.mark.parametrize("impl, reduction", CASES)
def test_equals_plain_cross_entropy(impl, reduction, z, cap, dtype, tolerance):
    hidden, weight, targets = example(dtype=dtype)
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = reduce(plain(h, w, targets, z, cap), targets, reduction)
    upstream = torch.linspace(-1.0, 2.0, 7) if reduction == "none" else torch.tensor(0.75)
    expected_grads = gradients(expected, h, w, upstream=upstream.double())
    for chunk in CHUNKS:
        loss = linear_cross_entropy(
            hidden, weight, targets, impl=impl, chunk_tokens=chunk, z_loss=z, softcap=cap, reduction=reduction
        )
        assert loss.dtype == dtype and loss.shape == expected.shape
        grads = gradients(loss, hidden, weight, upstream=upstream.to(dtype))
        for ours, reference in zip((loss, *grads), (expected, *expected_grads), strict=True):
            assert (ours.double() - reference).abs().max() <= tolerance * max(1.0, reference.abs().max().item())
        if reduction == "none":
            assert loss[[2, 5]].tolist() == [0.0, 0.0]
        assert not grads[0][[2, 5]].any()


@given(
    shape=st.tuples(st.integers(0, 4), st.integers(1, 6)),
    width=st.integers(1, 9),
    rows=st.integers(1, 40),
    chunk=st.integers(1, 30),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=40, deadline=None)
def test_every_size_agrees_with_the_reference(shape, width, rows, chunk, share, seed):
    tokens = shape[0] * shape[1]
    ignored = [i for i in range(tokens) if (i * 0.618) % 1 < share]
    hidden, weight, targets = example(tokens, width, rows, ignored, seed=seed, shape=shape)
    expected = plain(hidden, weight, targets)
    expected_grads = gradients(expected.sum(), hidden, weight)
    for impl in IMPLS:
        loss = linear_cross_entropy(hidden, weight, targets, impl=impl, chunk_tokens=chunk)
        for ours, reference in zip(
            (loss, *gradients(loss, hidden, weight)), (expected.sum(), *expected_grads), strict=True
        ):
            torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)
    each = linear_cross_entropy(hidden, weight, targets, impl="checkpoint", chunk_tokens=chunk, reduction="none")
    torch.testing.assert_close(each, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("ignored_positions")
@pytest.mark.parametrize("impl, reduction", CASES)
def test_nothing_supervised_is_exactly_zero(impl, reduction):
    hidden, weight, targets = example(ignored=range(7), dtype=torch.float32)
    loss = linear_cross_entropy(
        hidden, weight, targets, impl=impl, chunk_tokens=3, z_loss=1e-2, softcap=5.0, reduction=reduction
    )
    assert not loss.any()
    for grad in gradients(loss.sum(), hidden, weight):
        assert grad.eq(0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_large_logits_neither_overflow_nor_lose_the_small_ones(impl):
    hidden = torch.tensor([[1000.0], [-1000.0], [1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [1.0 - 2**-10], [-1.0]], requires_grad=True)
    targets = torch.tensor([0, 2, 2])
    losses = linear_cross_entropy(hidden, weight, targets, impl="checkpoint", chunk_tokens=2, reduction="none")
    first = math.log1p(math.exp(-1000 / 1024))
    torch.testing.assert_close(losses, torch.tensor([first, 0.0, 2000 + first]), rtol=1e-6, atol=0)
    loss = linear_cross_entropy(hidden, weight, targets, impl=impl, chunk_tokens=2)
    torch.testing.assert_close(loss, losses.sum())
    assert all(grad.isfinite().all() for grad in gradients(loss, hidden, weight))


@pytest.mark.parametrize("impl", IMPLS)
def test_only_what_asks_for_a_gradient_gets_one(impl):
    hidden, weight, targets = example()
    expected = gradients(plain(hidden, weight, targets).sum(), hidden, weight)
    for wanted, others in ((0, 1), (1, 0)):
        inputs = [hidden.detach(), weight.detach()]
        inputs[wanted].requires_grad_()
        loss = linear_cross_entropy(*inputs, targets, impl=impl, chunk_tokens=3)
        loss.backward()
        torch.testing.assert_close(inputs[wanted].grad, expected[wanted])
        assert inputs[others].grad is None
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, targets, impl=impl, chunk_tokens=3).requires_grad


@pytest.mark.parametrize("impl", IMPLS)
def test_the_graph_can_be_walked_twice(impl):
    hidden, weight, targets = example()
    loss = linear_cross_entropy(hidden, weight, targets, impl=impl, chunk_tokens=3)
    first = torch.autograd.grad(loss, (hidden, weight), torch.tensor(3.0).double(), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight), torch.tensor(1.0).double())
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, 3 * b)


def test_fused_refuses_what_it_cannot_differentiate():
    hidden, weight, targets = example()
    with pytest.raises(ValueError, match="checkpoint"):
        linear_cross_entropy(hidden, weight, targets, impl="fused", chunk_tokens=3, reduction="none")


@pytest.mark.parametrize("impl", ["checkpoint", "fused"])
def test_a_second_derivative_is_refused(impl):
    hidden, weight, targets = example()
    loss = linear_cross_entropy(hidden, weight, targets, impl=impl, chunk_tokens=3)
    with pytest.raises(ValueError, match="second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize(
    "change, told",
    [
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"chunk_tokens": -3}, "chunk_tokens=-3"),
        ({"impl": "magic"}, "impl='magic'"),
        ({"reduction": "max"}, "reduction='max'"),
        ({"targets": torch.zeros(6, dtype=torch.int64)}, "[7, 5]"),
        ({"weight": torch.zeros(11, 4)}, "[11, 4]"),
    ],
)
def test_wrong_arguments_are_named(change, told):
    hidden, weight, targets = example()
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, "impl": "full", "chunk_tokens": 3}
    with pytest.raises(ValueError) as error:
        linear_cross_entropy(**{**arguments, **change})
    assert told in str(error.value)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("impl", ["checkpoint", "fused"])
def test_bf16_sums_over_chunks_lose_nothing(impl, autocast):
    """The head's gradient over 256 chunks is as close to float32 as that of one GEMM."""
    hidden, weight, targets = example(8192, 16, 32, ignored=(), dtype=torch.bfloat16)
    h, w = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    (exact,) = gradients(plain(h, w, targets).sum(), w)
    if autocast:
        hidden, weight = h, w

    def error(impl, chunk):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = linear_cross_entropy(hidden, weight, targets, impl=impl, chunk_tokens=chunk)
        (grad,) = gradients(loss, weight)
        assert loss.dtype == torch.float32 and grad.dtype == weight.dtype
        return (grad.float() - exact).norm()

    assert error(impl, 32) <= 1.5 * error("full", 8192)


@pytest.mark.parametrize("impl", IMPLS)
def test_bf16_losses_have_a_float32_softmax(impl):
    """Beyond the rounding of its inputs and of its logits, nothing in the loss is bfloat16."""
    hidden, weight, targets = example(64, 16, 32, ignored=(3,), dtype=torch.bfloat16)
    logits = (hidden @ weight.T).double()
    expected = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    loss = linear_cross_entropy(hidden, weight, targets, impl=impl, chunk_tokens=10)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", IMPLS)
def test_only_a_chunk_of_logits_exists(impl, dtype):
    tokens, rows, chunk = 64, 96, 8
    hidden, weight, targets = example(tokens, 4, rows, dtype=dtype)
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, targets, impl=impl, chunk_tokens=chunk, softcap=9.0).backward()
    assert largest.elements == (tokens if impl == "full" else chunk) * rows
