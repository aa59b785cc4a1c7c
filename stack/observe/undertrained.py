"""Indicators of undertrained rows (Land & Bartolo 2024, "Fishing for Magikarp", arXiv:2405.05417, section 2.2).

Every step trains every row of the head: the logit of a token that never occurs is pushed down whatever the input. So
such rows come to share a direction, minus a constant vector of the hidden states. In the notation of the paper, with U
the head, c its first principal component and t the tokens known to be unused:

1. U' = U - (U c) cᵀ removes a constant that all rows may share;
2. u = the mean of U'[t];
3. 1 - cos(U'_i, u) is small where row i was trained no more than those.

That is the indicator of a tied table. Where the embedding is a table of its own, a row that never occurs as an input is
moved by decay alone, and its L2 norm |E_i| is the indicator; it needs no known token.

Names and order follow the code of the paper (cohere-ai/magikarp: ``ModelAnalyzer`` in ``magikarp/model.py``,
``embedding_distance_metrics`` in ``magikarp/utils.py``). It ranks by the distance without step 1, and so is done here:
where a good part of the rows is unused, as in small models, the first principal component is their direction.
Two things are otherwise. Rows that a vocabulary grew by begin elsewhere than those that pretraining left behind, and
keep another direction; so t may be several groups with a mean each, and the nearest counts. And a row of zeros has
distance 0 instead of 1, as nothing has trained it.

Sums are in float64, over chunks, so that a table is never copied whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

CHUNK = 8192  # rows in float64 at one time
NORM = "norm"  # |E_i|, of an embedding that is not the head
DISTANCE = "distance"  # 1 - cos(U_i, mean of U[t])
DISTANCE_WITHOUT_PC = "distance_without_pc"  # 1 - cos(U'_i, u)
Groups = Sequence[Sequence[int]]  # of ids, none empty


def indicators(table: Tensor, head: Tensor | None, unused: Groups) -> dict[str, Tensor]:
    """Every indicator that can be computed, the one that ranks first; low is undertrained.

    Args:
        table: the embedding, [rows, d], any float.
        head: [rows, d]; None where it is the table.
        unused: rows that are known to be unused; without any, only :data:`NORM` is left, of a tied table nothing.

    Returns:
        Float64 tensors [rows] by name.
    """
    found = {} if head is None else {NORM: norms(table)}
    output = table if head is None else head
    if len(unused):
        found[DISTANCE] = distances(output, unused)
        found[DISTANCE_WITHOUT_PC] = distances(output, unused, first_component(output))
    return found


def norms(rows: Tensor) -> Tensor:
    """L2 norms: ``[rows, d]`` → float64 [rows]."""
    return torch.cat([chunk.norm(dim=1) for chunk in _chunks(rows)])


def first_component(rows: Tensor) -> Tensor:
    """The first principal component of ``[rows, d]`` about its mean: a unit vector, float64 [d], of either sign."""
    mean = sum(chunk.sum(0) for chunk in _chunks(rows)) / len(rows)
    covariance = sum((chunk - mean).T @ (chunk - mean) for chunk in _chunks(rows))
    return torch.linalg.eigh(covariance).eigenvectors[:, -1]  # eigenvalues ascend


def distances(rows: Tensor, unused: Groups, component: Tensor | None = None) -> Tensor:
    """Cosine distance of every row to the nearest mean of a group of rows: 0 for its direction, 2 for the opposite.

    Args:
        rows: [rows, d].
        unused: at least one group.
        component: a unit vector [d] that is removed from every row before.

    Returns:
        Float64 [rows]; 0 for rows of zeros.
    """
    means = torch.stack([_without(rows[list(group)].double(), component).mean(0) for group in unused])
    found = []
    for chunk in _chunks(rows):
        cosines = _unit(_without(chunk, component)) @ _unit(means).T
        found.append(torch.where((chunk == 0).all(1), 0.0, (1 - cosines.amax(1)).clamp(min=0)))
    return torch.cat(found)


def nearest(rows: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The rows that have the largest cosine with each row of ``ids``, itself left out.

    Args:
        rows: [rows, d].
        ids: int64 [n].
        count: how many; fewer where there are not so many others.

    Returns:
        Ids int64 [n, count] and their cosines float64 [n, count], falling; the cosine with a row of zeros is 0.
    """
    wanted = _unit(rows[ids].double())
    count = min(count, len(rows) - 1)
    best, where = wanted.new_zeros(len(ids), 0), ids.new_zeros(len(ids), 0)
    begin = 0
    for chunk in _chunks(rows):
        cosines = wanted @ _unit(chunk).T
        here = torch.arange(begin, begin + len(chunk))
        cosines[ids[:, None] == here] = -torch.inf
        best = torch.cat((best, cosines), dim=1)
        where = torch.cat((where, here.expand(len(ids), -1)), dim=1)
        best, order = best.topk(min(count, best.shape[1]))
        where = where.gather(1, order)
        begin += len(chunk)
    return where, best


def _chunks(rows: Tensor) -> Iterator[Tensor]:
    return (chunk.double() for chunk in rows.split(CHUNK))


def _without(rows: Tensor, component: Tensor | None) -> Tensor:
    return rows if component is None else rows - torch.outer(rows @ component, component)


def _unit(rows: Tensor) -> Tensor:
    """Rows of length 1; a row of zeros stays."""
    lengths = rows.norm(dim=1, keepdim=True)
    return rows / lengths.where(lengths > 0, 1.0)
