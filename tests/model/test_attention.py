"""Law 3: segments of a packed window do not see each other, in any back end; each is what it would be alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.config import schema as config
from stack.model.attention import Segments, attend
from stack.model.decoder import Decoder

BACKENDS = ("segments", "mask")
WINDOW = 24
LENGTHS = ((5, 7, 4, 6), (9, 1, 14), (), (24,))  # a padded tail, a full window, a window of padding, one document
CPU = torch.device("cpu")


def packed(lengths=LENGTHS, window=WINDOW):
    """Ids, positions that restart in every segment, and targets that are ignored in the padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (len(lengths), window), generator=generator)
    positions = torch.zeros_like(ids)
    targets = torch.full_like(ids, -100)
    for row, segments in enumerate(lengths):
        begin = 0
        for length in segments:
            positions[row, begin : begin + length] = torch.arange(length)
            begin += length
        targets[row, :begin] = ids[row, :begin].roll(-1)
    return ids, positions, targets


def spans(lengths=LENGTHS):
    """Row and slice of every segment."""
    for row, segments in enumerate(lengths):
        begin = 0
        for length in segments:
            yield row, slice(begin, begin + length)
            begin += length


@pytest.fixture(scope="module")
def model():
    c = config.Model(2, 32, 4, 2, 8, 48, 64, 10000.0, 1e-6, True, 0.2, False, None, False)
    return Decoder(c, 32)


def hidden_of(model, ids, positions, backend, lengths=LENGTHS):
    return model.hidden(ids, positions, Segments(lengths, ids.shape[1], CPU, backend))


def plain_attention(q, k, v, row_lengths):
    """``softmax(q kᵀ / sqrt(D)) v`` of one window, position by position over the keys it may see."""
    heads, kv_heads, width = q.shape[1], k.shape[1], q.shape[2]
    out = torch.zeros_like(q)
    begin = 0
    for length in row_lengths:
        for t in range(begin, begin + length):
            for head in range(heads):
                keys, values = k[begin : t + 1, head * kv_heads // heads], v[begin : t + 1, head * kv_heads // heads]
                out[t, head] = torch.softmax(keys @ q[t, head] / width**0.5, 0) @ values
        begin += length
    return out


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_is_its_formula(backend):
    q = torch.randn(4, WINDOW, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 4, WINDOW, 2, 8, dtype=torch.float64)
    out = attend(q, k, v, Segments(LENGTHS, WINDOW, CPU, backend))
    expected = torch.stack([plain_attention(*row) for row in zip(q, k, v, LENGTHS, strict=True)])
    for row, span in spans():
        torch.testing.assert_close(out[row, span], expected[row, span], rtol=1e-12, atol=1e-12)
    assert out.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("changed", range(4))
def test_other_ids_in_one_segment_move_nothing_in_the_others(model, backend, changed):
    """Neither forwards nor backwards, to the last bit."""
    ids, positions, _ = packed()
    other = ids.clone()
    row, span = list(spans())[changed]
    other[row, span] = (ids[row, span] + 1 + torch.arange(span.stop - span.start) % 5) % 32
    for watched, (w_row, w_span) in enumerate(spans()):
        if watched == changed:
            continue
        found = []
        for these in (ids, other):
            hidden = hidden_of(model, these, positions, backend)
            seen = model.table.logits(hidden)[w_row, w_span]
            # The loss of the watched segment alone: no gradient of it may come through another one.
            loss = torch.nn.functional.cross_entropy(seen, ids[w_row, w_span], reduction="sum")
            found.append((seen, *torch.autograd.grad(loss, list(model.parameters()))))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_changed_segment_changes_its_own_logits(model, backend):
    """The law above is not kept by seeing nothing at all: every later position of the same segment moves."""
    ids, positions, _ = packed()
    other = ids.clone()
    other[0, 5] = (ids[0, 5] + 1) % 32  # the first token of the second segment
    moved = (hidden_of(model, ids, positions, backend) != hidden_of(model, other, positions, backend)).any(-1)
    assert moved[0].tolist() == [5 <= t < 12 for t in range(WINDOW)]
    assert not moved[1:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_packed_document_is_what_it_is_alone(model, backend):
    ids, positions, _ = packed()
    logits = model.table.logits(hidden_of(model, ids, positions, backend))
    for row, span in spans():
        torch.testing.assert_close(logits[row, span], model.logits(ids[row, None, span])[0], rtol=1e-5, atol=1e-5)


def test_back_ends_agree(model):
    ids, positions, targets = packed()
    found = []
    for backend in BACKENDS:
        logits = model.table.logits(hidden_of(model, ids, positions, backend))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        found.append((logits[targets != -100], *torch.autograd.grad(loss, list(model.parameters()))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_is_finite_and_gets_no_gradient(model, backend):
    ids, positions, targets = packed()
    embedded = []
    handle = model.model.layers[0].input_layernorm.register_forward_pre_hook(lambda _, x: embedded.append(x[0]))
    hidden = hidden_of(model, ids, positions, backend)
    handle.remove()
    loss = torch.nn.functional.cross_entropy(model.table.logits(hidden).flatten(0, 1), targets.flatten())
    (grad,) = torch.autograd.grad(loss, embedded[0])
    assert hidden.isfinite().all() and grad.isfinite().all()
    assert not grad[targets == -100].any()
    assert grad[targets != -100].abs().sum(-1).gt(0).all()


@given(st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=1, max_size=3), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_mask_and_pieces_describe_the_same_segments(rows, rest):
    lengths = tuple(map(tuple, rows))
    window = max(1, max(map(sum, lengths)) + rest)
    segments = Segments(lengths, window, CPU)
    assert sum(size for size, _ in segments.pieces) == len(lengths) * window
    expected = torch.zeros(len(lengths), window, window, dtype=torch.bool)
    at = 0
    for size, padding in segments.pieces:
        row, begin = divmod(at, window)
        assert begin + size <= window and padding == (begin >= sum(lengths[row]))
        expected[row, begin : begin + size, begin : begin + size] = torch.ones(size, size).tril().bool()
        at += size
    assert torch.equal(segments.mask[:, 0], expected)
    assert segments.per_segment and not Segments(lengths, window, torch.device("cuda")).per_segment
