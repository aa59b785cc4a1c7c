"""Validation is a mean over tokens, in nats and in bits per byte, however it is cut into batches."""

import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stack import config
from stack.data.batches import in_order
from stack.data.packing import Split
from stack.distributed import Ranks
from stack.evaluate import Validation, validate
from stack.model.transformer import Decoder

ROWS = 64
PAD = 1
ALONE = Ranks()


def split_of(*lengths):
    """Documents of these numbers of tokens, each after its separator 0."""
    rng = np.random.default_rng(0)
    stream = [0]
    starts = []
    for length in lengths:
        starts.append(len(stream) - 1)
        stream += [*rng.integers(2, ROWS, length), 0]
    inputs = np.array(lengths) + 1
    return Split("validation", inputs, np.array(starts), 0, (np.array(stream, dtype=np.uint16),), np.array([0]))


def validation_of(model, windows, micro_batch=2, ranks=ALONE, num_bytes=100):
    return validate(model, windows, num_bytes, micro_batch=micro_batch, chunk_tokens=7, ranks=ranks, device="cpu")


@pytest.fixture(scope="module")
def model():
    return Decoder(config.Model(2, 32, 4, 2, 8, 48, 64, 10000.0, 1e-6, True, 0.2, False, None, False), ROWS, seed=1)


class Fixed:
    """In the place of a decoder: sums 3 and 5 for batches of 1 and 4 targets."""

    uncompiled = nullcontext

    def token_losses(self, ids, positions, segments, targets, chunk_tokens):
        learnt = targets != -100
        return learnt * {1: 3.0, 4: 1.25}[int(learnt.sum())]


def test_batches_of_unequal_size_are_not_averaged_as_equals():
    """(3 + 5) / (1 + 4) = 1.6, where a mean of means would be (3 + 1.25) / 2."""
    found = validation_of(Fixed(), in_order(split_of(3, 0), 4, PAD), micro_batch=1)
    assert (found.nats, found.num_targets, found.loss) == ({"text": 8.0}, {"text": 5}, 1.6)


def test_bits_per_byte():
    """A model that gives each of 50 tokens 3 bits spends 150 bits on the 60 bytes, whatever a token is."""
    found = Validation({"a": 20 * 3 * math.log(2), "b": 30 * 3 * math.log(2)}, {"a": 20, "b": 30}, 60)
    assert found.bits_per_byte == pytest.approx(2.5)
    assert found.loss == pytest.approx(3 * math.log(2))
    assert set(found.figures()) == {"loss", "bits_per_byte", "loss_a", "loss_b"}
    assert "bits_per_byte" not in Validation({"a": 1.0}, {"a": 1}, None).figures()


def test_sources_are_summed_apart(model):
    """Every source has the loss that its documents have alone, though they share windows."""
    split = split_of(11, 3, 0, 15, 7, 1)
    stream, of = split.ids(0, int(split.lengths.sum()) + 1), np.array([0, 1, 0, 1, 1, 0])
    mixed = replace(split, sources=("a", "b"))
    vars(mixed)["source_of"] = of  # one shard here; a packed folder has one for every source
    found = validation_of(model, in_order(mixed, 16, PAD), micro_batch=3)
    for number, name in enumerate(mixed.sources):
        nats = count = 0.0
        for start, length in zip(split.starts[of == number], split.lengths[of == number], strict=True):
            document = torch.from_numpy(stream[start : start + length + 1].astype(np.int64))
            with torch.no_grad():
                logits = model.logits(document[None, :-1])[0]
            nats += F.cross_entropy(logits, document[1:], reduction="sum").item()
            count += int(length)
        assert found.num_targets[name] == count
        assert found.nats[name] == pytest.approx(nats, rel=1e-6)
        assert found.figures()[f"loss_{name}"] == pytest.approx(nats / count, rel=1e-6)


def test_equals_every_document_scored_alone(model):
    """Plain cross-entropy of each document's tokens and its closing separator, one document at a time."""
    split = split_of(11, 3, 0, 15, 7, 1)
    stream = split.ids(0, int(split.lengths.sum()) + 1)
    nats = 0.0
    with torch.no_grad():
        for start, length in zip(split.starts, split.lengths, strict=True):
            document = torch.from_numpy(stream[start : start + length + 1].astype(np.int64))
            nats += F.cross_entropy(model.logits(document[None, :-1])[0], document[1:], reduction="sum").item()
    found = validation_of(model, in_order(split, 16, PAD))
    assert found.num_targets == {"text": len(stream) - 1}
    assert found.nats["text"] == pytest.approx(nats, rel=1e-6)


def test_micro_batches_change_nothing(model):
    windows = in_order(split_of(11, 3, 0, 15, 7, 1, 9, 9), 16, PAD)
    found = [validation_of(model, windows, size) for size in (1, 2, 3, 100)]
    assert len({v.num_targets["text"] for v in found}) == 1
    assert all(v.nats["text"] == pytest.approx(found[0].nats["text"], rel=1e-6) for v in found)
    assert found[0].bits_per_byte == pytest.approx(found[0].nats["text"] / (100 * math.log(2)))


def test_ranks_share_the_windows_without_overlap(model):
    """What three ranks add up to is what one finds; a rank with no window adds nothing."""

    class Alone(Ranks):
        def sum(self, *values):
            return list(values)

    windows = in_order(split_of(11, 3, 0, 15, 7, 1, 9, 9), 16, PAD)
    whole = validation_of(model, windows)
    for world in (3, 50):
        parts = [validation_of(model, windows, 1, Alone(rank, world)) for rank in range(world)]
        assert sum(v.num_targets["text"] for v in parts) == whole.num_targets["text"]
        assert sum(v.nats["text"] for v in parts) == pytest.approx(whole.nats["text"], rel=1e-6)


def test_no_gradient_and_no_change(model):
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.get_rng_state()
    validation_of(model, in_order(split_of(5, 6), 16, PAD))
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and torch.equal(state, torch.get_rng_state())
