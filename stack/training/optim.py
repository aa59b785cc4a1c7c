"""Optimizers and schedules: AdamW for every parameter, or Muon for the hidden matrices and AdamW for the rest.

State is addressed by parameter name (``exp_avg/model.norm.weight``), so a checkpoint means the same whatever the
order of parameters, groups or ranks. Learning rates and Muon's momentum are pure functions of the step number; no
scheduler has a state to lose.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stack.config import schema as config
from stack.core.errors import UserError, some
from stack.core.ranks import ALONE, Ranks
from stack.model.decoder import Decoder
from stack.model.names import by_name
from stack.training.muon import Muon


def lr_factor(schedule: config.Schedule, step: int, steps: int) -> float:
    """The factor of every learning rate at ``step`` (0 … steps - 1) of ``steps``.

    A linear warm-up over ``schedule.warmup`` steps, then by kind: ``constant``; ``cosine`` down to ``final`` at the
    end (Loshchilov & Hutter, 2017); ``wsd``, constant until the last ``decay`` of all steps, then down to ``final``,
    linearly or as ``1 - sqrt(x)`` (Hu et al., 2024; Hägele et al., 2024).
    """
    s = schedule
    rise = min(1.0, (step + 1) / (s.warmup + 1))
    if s.kind == "constant":
        return rise
    start = min(s.warmup, steps) if s.kind == "cosine" else steps - round(s.decay * steps)
    # The last step still moves: the factor reaches `final` one step after the end.
    x = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
    if s.kind == "cosine":
        fall = 0.5 * (1 + math.cos(math.pi * x))
    else:
        fall = 1 - x if s.shape == "linear" else 1 - math.sqrt(x)
    return rise * (s.final + (1 - s.final) * fall)


class Optimizers:
    """All optimizers of a run behind one step and one named state.

    Every trainable parameter is in exactly one group: ``table``, which holds the norms, too (AdamW, ``table_decay``),
    or ``matrices`` (Muon, or AdamW where ``kind=adamw``).
    """

    def __init__(self, model: Decoder, c: config.Optim, *, ns_dtype: torch.dtype = torch.float32, ranks: Ranks = ALONE):
        self.config = c
        self.names = {name: p for name, p in by_name(model.named_parameters()).items() if p.requires_grad}
        rows = {id(row.tensor) for row in model.row_parameters()}
        matrices = {n: p for n, p in self.names.items() if p.dim() == 2 and id(p) not in rows}
        rest = [p for n, p in self.names.items() if n not in matrices]
        groups = [{"params": rest, "lr": c.lr, "weight_decay": c.table_decay, "name": "table"}]
        self.all: list[torch.optim.Optimizer] = []
        group = {"params": list(matrices.values()), "weight_decay": c.weight_decay, "name": "matrices"}
        if c.kind == "muon":
            group |= {"lr": c.matrix_lr, "momentum": c.momentum}
            self.all.append(Muon([group], ns_steps=c.ns_steps, dtype=ns_dtype, ranks=ranks))
        else:
            groups.append(group | {"lr": c.lr})
        fused = rest[0].device.type in ("cpu", "cuda")
        self.all.append(torch.optim.AdamW(groups, betas=(c.beta1, c.beta2), eps=c.eps, fused=fused))
        for group in self.groups():
            group["peak_lr"] = group["lr"]

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers; each has ``name``, ``lr`` and ``peak_lr``."""
        return [group for optimizer in self.all for group in optimizer.param_groups]

    def step(self, step: int, factor: float) -> None:
        """One update at ``step`` with every learning rate at ``factor`` of its peak."""
        c = self.config
        rise = min(1.0, step / c.momentum_warmup) if c.momentum_warmup else 1.0
        for group in self.groups():
            group["lr"] = group["peak_lr"] * factor
            if "momentum" in group:
                group["momentum"] = c.momentum_start + rise * (c.momentum - c.momentum_start)
        for optimizer in self.all:
            optimizer.step()

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, Tensor]:
        """The live state, keyed ``KIND/PARAMETER``; empty before the first step."""
        return {key: state[p][kind] for key, (state, p, kind) in self._slots().items() if p in state}

    def load_moments(self, moments: dict[str, Tensor]) -> None:
        """Takes the state that :meth:`moments` gave; :class:`UserError` where names, kinds or shapes do not fit."""
        slots = self._slots()
        missing, unexpected = sorted(slots.keys() - moments.keys()), sorted(moments.keys() - slots.keys())
        if moments and (missing or unexpected):
            raise UserError(
                f"the checkpoint's optimizer state does not fit optim.kind={self.config.kind}; take the optimizer and "
                f"the model that made it. Missing: {some(missing, 4)}. Unexpected: {some(unexpected, 4)}"
            )
        for key, value in moments.items():
            _, p, kind = slots[key]
            wanted = torch.Size() if kind == "step" else p.shape
            if value.shape != wanted:
                raise UserError(f"moment {key} has shape {list(value.shape)}; {list(wanted)} is needed")
        for optimizer in self.all:
            optimizer.state.clear()
        for key, value in moments.items():
            state, p, kind = slots[key]
            state[p][kind] = value.to(p.device, copy=True)

    def _slots(self) -> dict[str, tuple[dict[Tensor, dict[str, Tensor]], Tensor, str]]:
        """Where each moment lives: the state of its optimizer, its parameter and its kind."""
        names = {p: name for name, p in self.names.items()}
        return {
            f"{kind}/{names[p]}": (optimizer.state, p, kind)
            for optimizer in self.all
            for group in optimizer.param_groups
            for p in group["params"]
            for kind in (("momentum_buffer",) if isinstance(optimizer, Muon) else ("step", "exp_avg", "exp_avg_sq"))
        }
