"""Ranks: who this process is among them, and the few collectives that the program needs.

Nothing is pickled on the wire either: what rank 0 tells the others is JSON.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stack.config import EchoError, UserError


@dataclass(frozen=True)
class Ranks:
    """This process among ``world`` of them; ``local`` counts within its machine."""

    rank: int = 0
    world: int = 1
    local: int = 0
    waiting: Any = None  # a group for waits that may take hours, as for rank 0 to pack

    @property
    def main(self) -> bool:
        """True on the one rank that writes files and speaks."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks, in float64: exact for counts below 2^53."""
        if self.world == 1:
            return list(values)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        total = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return total.tolist()

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, on the device of the run, becomes its sum over all ranks; returned as well."""
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def shared(self, x: torch.Tensor, work: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """``work(x)`` for work that treats the rows of ``x`` ``[n, …]`` alike, each rank a part of them.

        ``x`` is the same on every rank, and so is the result, which has its shape.
        """
        if self.world == 1:
            return work(x)
        each = -(-len(x) // self.world)
        padded = torch.cat([x, x.new_zeros(each * self.world - len(x), *x.shape[1:])])
        parts = torch.empty_like(padded)
        dist.all_gather_single(parts, work(padded[self.rank * each : (self.rank + 1) * each]).contiguous())
        return parts[: len(x)]

    def on_main(self, work: Callable[[], Any]) -> Any:
        """``work()`` on rank 0; every rank gets its JSON result, or fails as rank 0 failed."""
        if self.world == 1:
            return work()
        answer: dict[str, Any] = {}
        if self.main:
            try:
                answer = {"result": work()}
            except UserError as error:
                answer = {"error": str(error)}
                self._tell(answer)
                raise
        answer = self._tell(answer)
        if "error" in answer:
            raise EchoError(answer["error"])
        return answer["result"]

    def _tell(self, answer: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(answer).encode() if self.main else b""
        size = torch.tensor([len(text)])
        dist.broadcast(size, 0, group=self.waiting)
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if self.main else torch.empty(int(size)).byte()
        dist.broadcast(data, 0, group=self.waiting)
        return json.loads(bytes(data.tolist()))


ALONE = Ranks()
_groups = itertools.count()


def _meeting_place() -> dict[str, Any]:
    """Where the ranks of a process group find each other, another one for each group that this process is in.

    The jobs of a sweep are groups one after the other, and torchrun's store outlives them: under the same keys a rank
    would find the address that another one had in the job before.
    """
    store, rank, world = _store()
    return {"store": dist.PrefixStore(f"group {next(_groups)}", store), "rank": rank, "world_size": world}


@functools.cache
def _store() -> tuple[Any, int, int]:
    return next(dist.rendezvous("env://"))


@contextmanager
def ranks(kind: str, device: str) -> Iterator[Ranks]:
    """The process group of a run: none for ``parallel=none``, gloo or NCCL for ``parallel=ddp``.

    Raises:
        UserError: ``parallel=ddp`` outside of ``torchrun``, or ``torchrun`` without ``parallel=ddp``.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if kind == "none":
        if world > 1:
            raise (UserError if os.environ.get("RANK", "0") == "0" else EchoError)(
                f"torchrun started {world} processes, but parallel=none lets each train the same run; add parallel=ddp"
            )
        yield Ranks()
        return
    if "RANK" not in os.environ:
        raise UserError(
            f"parallel={kind} needs the processes that torchrun starts: "
            f"torchrun --nproc-per-node=N -m stack.train parallel={kind}"
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **_meeting_place())
    try:
        waiting = dist.new_group(backend="gloo", timeout=timedelta(days=7))
        yield Ranks(dist.get_rank(), dist.get_world_size(), local, waiting)
    finally:
        dist.destroy_process_group()
