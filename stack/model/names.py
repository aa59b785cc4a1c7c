"""The name of a parameter: the same one in a model, its wrappers, its optimizer, and the files of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

_WRAPPERS = re.compile(r"(?<![^./])(?:_orig_mod\.|module\.)+")  # of torch.compile and of DDP, at any depth


def clean_name(name: str) -> str:
    """The parameter's own name: without ``_orig_mod.`` and ``module.``, wherever they stand.

    A moment is named after its parameter, as ``exp_avg/model.norm.weight``.
    """
    return _WRAPPERS.sub("", name)


def by_name(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors by their :func:`clean_name`, in the order given."""
    given = dict(tensors)
    named = {clean_name(name): tensor for name, tensor in given.items()}
    assert len(named) == len(given), "two names are one without their wrappers"
    return named
