"""What the rows of the table do: how long they are, how they lie, who pulls at them, and how far they move.

The table is embedding and head at once, so its gradient is the sum of two: of the input path, where a row that was
read is pulled by what its token did in the model, and of the output path, where every row is pulled at every position
by ``p - onehot``. At a snapshot the first is summed apart in a hook on the rows that were read; the
second is the rest. A step with a snapshot changes weights and moments bit for bit as any other does.

Everything is of the whole global batch: equal for any accumulation and number of ranks, up to rounding.

A snapshot becomes one row of ``metrics.jsonl``. Its keys are ``rows/WHAT``, or ``rows/WHAT_STATISTIC`` over all rows
and ``rows/WHAT_STATISTIC_CLASS`` over those of a class. Statistics are over what is finite, six digits of each.

=====================  ==============================================================================================
``norm``               of each row: min, p05, p25, p50, p75, p95, max
``distance``           of each row from the mean of all rows: mean, p50, max, as below
``grad_input``         norm of each row's gradient by the input path, before clipping
``grad_output``        the same by the output path
``second_moment``      mean over each row of AdamW's ``exp_avg_sq``, after the update
``update_ratio``       norm of the row's change in this step over its norm before; absent where no update was taken
``mean_norm``          norm of the mean row
``anisotropy``         share of the first principal direction in the sum of squares of all rows, not centred: the
                       largest eigenvalue of EᵀE over their sum, the maximum explainable variance of Ethayarajh (2019);
                       it is large where rows share a direction (Gao et al., 2019, "representation degeneration")
``anisotropy_centred`` the same after the mean row is taken from each: without the shared shift that most of the
                       anisotropy of embeddings comes from (Biś et al., 2021)
``grad_input_norm``    norm of the whole gradient of the table by the input path
``grad_output_norm``   the same by the output path
``mass_CLASS``         mean probability that the model gives to the rows of a class, over the supervised positions
``count_CLASS``        rows in it
``never_updated``      rows with all moments zero
``never_input``        rows that were no input so far in the run, in windows with a target
``…_nonfinite``        rows for which WHAT is not finite; absent where there is none
``…_histogram``        of ``norm`` and of log10 of ``grad_output``: ``{"edges": […], "counts": […], "nonfinite": n}``
=====================  ==============================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stack.core.ranks import Ranks
from stack.data.batches import IGNORED, Batch
from stack.model.embedding import Embedding
from stack.training.hooks import Hook, Moment
from stack.training.optim import Optimizers
from stack.vocabulary.classes import CLASSES

BINS = 32

Statistic = Callable[[np.ndarray], Any]
QUANTILES: dict[str, Statistic] = {
    "min": np.min,
    **{f"p{q:02}": lambda x, q=q: np.percentile(x, q) for q in (5, 25, 50, 75, 95)},
    "max": np.max,
}
SUMMARY: dict[str, Statistic] = {"mean": np.mean, "p50": np.median, "max": np.max}


class TableSnapshots(Hook):
    """Looks at a table while it is trained.

    Args:
        table: embedding and head of the model.
        optimizers: have its moments.
        classes: as :func:`stack.vocabulary.classes.classify` gives them; None: all rows are one class.
        ranks: this process among others; every one calls all methods at the same steps.
        every: steps between two snapshots; 0: none.
        steps: the end of the run, after which there is one more.
    """

    def __init__(
        self, table: Embedding, optimizers: Optimizers, classes: np.ndarray | None, ranks: Ranks, every: int, steps: int
    ):
        self.table, self.optimizers, self.classes, self.ranks = table, optimizers, classes, ranks
        self.every, self.steps = every, steps
        (rows,) = table.row_parameters()  # one alone, so its gradient is the sum of both paths
        self.name, self.weight = rows.name, rows.tensor
        self.due = False  # at the step in hand
        self._per_row: dict[str, Tensor] = {}  # [V], of the step in hand
        self._seen = torch.zeros(table.num_rows, dtype=torch.bool)  # inputs of this rank so far

    # --------------------------------------------------------------------------------------------- in a step

    def before_step(self, step: int) -> None:
        """Observes the table from here on, where a snapshot is due at ``step`` (0 … steps - 1)."""
        self.due = bool(self.every) and ((step + 1) % self.every == 0 or step + 1 == self.steps)
        self._per_row = {}
        if self.due:
            self._input = torch.zeros_like(self.weight)
            self._mass = torch.zeros(self.table.num_rows + 1, device=self.table.device)  # the last one: positions
            self.table.observer = self

    def embedded(self, ids: Tensor, rows: Tensor) -> None:
        """Has the gradient of ``rows`` summed by id when it is there."""
        rows.register_hook(lambda gradient: self._add(ids, gradient))

    def _add(self, ids: Tensor, gradient: Tensor) -> None:
        self._input.index_add_(0, ids.flatten(), gradient.flatten(0, -2).to(self._input.dtype))

    @torch.no_grad()
    def scored(self, hidden: Tensor, targets: Tensor, chunk_tokens: int) -> None:
        """Sums the probability of every row over the supervised positions, so many of them at a time."""
        for chunk in hidden.detach()[targets != IGNORED].split(chunk_tokens):
            self._mass[:-1] += self.table.logits(chunk).softmax(-1).sum(0)
            self._mass[-1] += len(chunk)

    def gradient_paths(self) -> tuple[Tensor, Tensor]:
        """The gradient of the table by the input path and by the output path, ``[V, d]`` each; a collective.

        To be called once, after the last backward pass of a step with a snapshot and before clipping. Their sum is
        the gradient of the whole global batch.
        """
        into = self.ranks.add(self._input)
        into /= self.ranks.world  # as DDP averages
        return into, self.weight.grad - into

    @torch.no_grad()
    def after_backward(self) -> None:
        """What is known before clipping and the update, where a snapshot is due."""
        self.table.observer = None
        if not self.due:
            return
        into, out = self.gradient_paths()
        self._per_row |= {"grad_input": into.norm(dim=1), "grad_output": out.norm(dim=1)}
        self._mass = self.ranks.add(self._mass)
        self._input = into.copy_(self.weight)  # the table before; one buffer is enough

    @torch.no_grad()
    def after_step(self, moment: Moment) -> dict[str, Any]:
        """The snapshot of this step, where one is due; the inputs of a step that was taken are noted in any case."""
        if moment.result.taken:
            self._after_update()
            self.saw(moment.batches)
        return self.figures()

    def _after_update(self) -> None:
        """What is known after the update, where a snapshot is due."""
        if self.due:
            before = self._input.norm(dim=1)
            self._per_row["update_ratio"] = self._input.sub_(self.weight).norm(dim=1) / before

    # ---------------------------------------------------------------------------------------------- the inputs

    def saw(self, batches: Iterable[Batch]) -> None:
        """Notes the inputs of a step's windows with a target."""
        for batch in batches:
            supervised = (batch.targets != IGNORED).any(1, keepdim=True)
            inside = torch.arange(batch.ids.shape[1]) < torch.tensor([sum(row) for row in batch.lengths])[:, None]
            self._seen[batch.ids[supervised & inside]] = True

    def state(self) -> dict[str, Any]:
        """The rows that were an input so far on any rank: a bit each, in hex; a collective."""
        self._gather_seen()
        return {"seen": np.packbits(self._seen.numpy()).tobytes().hex()}

    def _gather_seen(self) -> None:
        self._seen = self.ranks.add(self._seen.to(self.table.device, torch.int32)).cpu() > 0

    def load(self, values: dict[str, Any]) -> None:
        """Takes what :meth:`state` gave; of a checkpoint without it, no row was an input so far."""
        size = len(self._seen)
        state = values.pop("seen", "") or "00" * size
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(state), dtype=np.uint8), count=size)
        self._seen = torch.from_numpy(bits).bool()

    # --------------------------------------------------------------------------------------------- what it shows

    @torch.no_grad()
    def figures(self) -> dict[str, Any]:
        """The snapshot of this step under the keys that the module names, on rank 0; nothing where none was due.

        A collective where one was. Forgets what it has given.
        """
        if not self.due:
            return {}
        self.due = False
        self._gather_seen()
        if not self.ranks.main:
            return {}
        weight, moments = self.weight.detach(), self.optimizers.moments()
        mean = weight.mean(0)
        centred = torch.sub(weight, mean, out=self._input)
        per_row = {"norm": weight.norm(dim=1), "distance": centred.norm(dim=1), **self._per_row}
        found = _directions(centred, mean)
        kinds = [moments[key] for kind in ("exp_avg", "exp_avg_sq") if (key := f"{kind}/{self.name}") in moments]
        if kinds:
            per_row["second_moment"] = kinds[1].mean(1)
            found["never_updated"] = int(torch.stack([(m == 0).all(1) for m in kinds]).all(0).sum())
        found["never_input"] = int((~self._seen).sum())
        values = {what: x.double().cpu().numpy() for what, x in per_row.items()}
        for what, x in values.items():
            found |= self._statistics(what, x, QUANTILES if what == "norm" else SUMMARY)
        for path in ("grad_input", "grad_output"):
            found[f"{path}_norm"] = float(np.linalg.norm(values[path]))
        mass = (self._mass[:-1] / self._mass[-1].clamp(min=1)).double().cpu().numpy()
        for name, chosen in self._groups().items():
            if name:
                found |= {f"mass{name}": float(mass[chosen].sum()), f"count{name}": int(chosen.sum())}
        found["norm_histogram"] = histogram(values["norm"])
        with np.errstate(divide="ignore"):
            found["grad_output_histogram"] = histogram(np.log10(values["grad_output"]))
        del self._input, self._mass
        return {f"rows/{key}": _short(value) for key, value in found.items()}

    def _groups(self) -> dict[str, np.ndarray]:
        """All rows, and those of every class that has any: the suffix of a key, and which rows, bool [V]."""
        whole = {"": np.ones(self.table.num_rows, dtype=bool)}
        if self.classes is None:
            return whole
        return whole | {f"_{name}": m for i, name in enumerate(CLASSES) if (m := self.classes == i).any()}

    def _statistics(self, what: str, values: np.ndarray, statistics: dict[str, Statistic]) -> dict[str, float]:
        """``WHAT_STATISTIC`` and ``WHAT_STATISTIC_CLASS`` of values [V], and how many are not finite."""
        finite = np.isfinite(values)
        found: dict[str, float] = {} if finite.all() else {f"{what}_nonfinite": int((~finite).sum())}
        for suffix, chosen in self._groups().items():
            if (chosen & finite).any():
                some = values[chosen & finite]
                found |= {f"{what}_{key}{suffix}": float(statistic(some)) for key, statistic in statistics.items()}
        return found


def _directions(centred: Tensor, mean: Tensor) -> dict[str, float]:
    """``mean_norm`` and both anisotropies from the centred rows ``[V, d]`` and their mean ``[d]``."""
    around = (centred.T @ centred).double().cpu()
    shift = mean.double().cpu()
    found = {"mean_norm": shift.norm().item()}
    for key, gram in (("anisotropy", around + len(centred) * shift.outer(shift)), ("anisotropy_centred", around)):
        trace = gram.trace().item()
        known = math.isfinite(trace) and trace > 0
        found[key] = torch.linalg.eigvalsh(gram)[-1].item() / trace if known else math.nan
    return found


def histogram(values: np.ndarray) -> dict[str, Any]:
    """``edges`` [BINS + 1] from the least to the greatest finite value, ``counts`` [BINS], and ``nonfinite`` values.

    Plain numbers; with no finite value both lists are empty. The one value of a constant stands in the middle.
    """
    finite = values[np.isfinite(values)]
    edges, counts = np.zeros(0), np.zeros(0)
    if len(finite):
        low, high = float(finite.min()), float(finite.max())
        room = 0.0 if low < high else abs(low) / 2 or 0.5
        # Given as a number, BINS would be an error where they are narrower than the values' last digit.
        edges = np.linspace(low - room, high + room, BINS + 1)
        counts, _ = np.histogram(finite, edges)
    return {
        "edges": [float(edge) for edge in edges],
        "counts": [int(count) for count in counts],
        "nonfinite": len(values) - len(finite),
    }


def _short(value: Any) -> Any:
    """A float at six digits: float32 has hardly more, and a snapshot is a long row."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
