"""stack.observe.undertrained: the formulas against NumPy in float64, whatever the chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.observe import undertrained
from stack.observe.undertrained import DISTANCE, DISTANCE_WITHOUT_PC, NORM, indicators, nearest


def table(rows: int, d: int, seed: int) -> torch.Tensor:
    """Rows with a common part, as those of a language model have."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, d, generator=draw) * torch.linspace(3, 0.5, d) + 2 * torch.randn(d, generator=draw)


def paper(head: np.ndarray, groups: list[list[int]], remove: bool) -> np.ndarray:
    """Section 2.2 as it is written, the nearest of several groups."""
    if remove:
        c = np.linalg.svd(head - head.mean(0))[2][0]
        head = head - np.outer(head @ c, c)
    means = [head[group].mean(0) for group in groups]
    return np.min([1 - head @ u / (np.linalg.norm(head, axis=1) * np.linalg.norm(u)) for u in means], axis=0)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(12, 60), d=st.integers(2, 9), chunk=st.integers(1, 70), seed=st.integers(0, 99), tied=st.booleans()
)
def test_indicators_are_those_of_the_paper(rows: int, d: int, chunk: int, seed: int, tied: bool) -> None:
    embedding, head = table(rows, d, seed), None if tied else table(rows, d, seed + 1000)
    groups = [[1, 4, 5], [0]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(undertrained, "CHUNK", chunk)
        found = indicators(embedding, head, groups)
        without = indicators(embedding, head, [])
    output = (embedding if head is None else head).double().numpy()
    expected = {DISTANCE: paper(output, groups, False), DISTANCE_WITHOUT_PC: paper(output, groups, True)}
    if not tied:
        expected = {NORM: np.linalg.norm(embedding.double().numpy(), axis=1)} | expected
    assert list(found) == list(expected) and list(without) == [NORM] * (not tied)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].numpy(), values, rtol=1e-9, atol=1e-9, err_msg=name)


def test_scale_and_rotation_move_no_distance() -> None:
    rows, groups = table(200, 16, 0).double(), [[3, 7, 9]]
    turn = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0]
    for name, values in indicators(rows, None, groups).items():
        torch.testing.assert_close(indicators(5 * rows @ turn, None, groups)[name], values, rtol=1e-9, atol=1e-9)


def test_a_constant_that_all_rows_share_hides_nothing_without_the_first_component() -> None:
    """Unused rows have a direction of their own, seen once the one that spreads most is gone."""
    draw = torch.Generator().manual_seed(0)
    common = torch.randn(500, 1, generator=draw) * 50 * torch.nn.functional.one_hot(torch.tensor(0), 32)
    rows = common + torch.randn(500, 32, generator=draw)
    rows[:20, 1:] = torch.randn(31, generator=draw) * 2
    first = {name: set(values.argsort()[:20].tolist()) for name, values in indicators(rows, None, [[0, 1]]).items()}
    assert first[DISTANCE_WITHOUT_PC] == set(range(20)) != first[DISTANCE]


def test_rows_of_zeros_come_first() -> None:
    rows = table(50, 8, 0)
    rows[[10, 20]] = 0
    for head in (None, rows):
        for values in indicators(rows, head, [[1, 2]]).values():
            assert values.argsort(stable=True)[:2].tolist() == [10, 20] and values.isfinite().all()


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), count=st.integers(0, 6), chunk=st.integers(1, 45), seed=st.integers(0, 99))
def test_nearest_rows_are_those_of_the_whole_matrix(rows: int, count: int, chunk: int, seed: int) -> None:
    found = table(rows, 5, seed)
    ids = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: 1 + rows // 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(undertrained, "CHUNK", chunk)
        where, cosines = nearest(found, ids, count)
    unit = found.double().numpy() / np.linalg.norm(found.double().numpy(), axis=1, keepdims=True)
    every = unit @ unit.T
    np.fill_diagonal(every, -np.inf)
    expected = np.argsort(-every[ids.numpy()], axis=1)[:, : min(count, rows - 1)]
    assert where.tolist() == expected.tolist()
    np.testing.assert_allclose(cosines.numpy(), np.take_along_axis(every[ids.numpy()], expected, 1), atol=1e-12)


def test_a_row_of_zeros_is_near_to_nothing() -> None:
    where, cosines = nearest(torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.1]]), torch.tensor([0, 1]), 5)
    assert cosines[0].tolist() == [0.0, 0.0] and where[1].tolist() == [2, 0] and cosines[1, 0] > 0.99
