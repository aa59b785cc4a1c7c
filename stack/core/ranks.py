"""Ranks: who this process is among them, and the few collectives that the program needs.

Nothing is pickled on the wire either: what rank 0 tells the others is JSON.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stack.core.errors import EchoError, LostError, UserError

T = TypeVar("T")
SHARED = "\nevery machine needs the same files under the same names: put data_dir and runs_dir where all see them"


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

    def gather_rows(self, x: torch.Tensor, work: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
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
        """``work()`` on rank 0; every rank gets its JSON result, or fails as rank 0 failed.

        Raises:
            UserError: as ``work`` does, on rank 0; on the others :class:`~stack.core.errors.EchoError`.
            LostError: on the others, where rank 0 failed otherwise.
        """
        if self.world == 1:
            return work()
        answer: dict[str, Any] = {}
        if self.main:
            try:
                answer = {"result": work()}
            except Exception as error:
                self._tell(_failure(error))
                raise
        answer = self._tell(answer)
        if "error" in answer:
            raise EchoError(answer["error"])
        if "fault" in answer:
            raise LostError(f"rank 0 failed: {answer['fault']}")
        return answer["result"]

    def on_all(self, work: Callable[[], T], hint: str = "") -> T:
        """``work()`` on every rank, for what may fail on one of them alone; each gets its own result, or all fail.

        ``hint`` is added where some ranks could do it and others could not.

        Raises:
            UserError: what failed first by rank, with the rank and its host where it is not all of them; from rank 0.
                On the others :class:`~stack.core.errors.EchoError`.
            LostError: where another rank failed by a fault of ours, which has its traceback there.
        """
        if self.world == 1:
            return work()
        try:
            result, own = work(), {}
        except UserError as error:
            own = _failure(error)
        except Exception as error:
            self._gather(_failure(error))
            raise
        found = self._gather(own)
        failed = [(rank, answer) for rank, answer in enumerate(found) if answer]
        if not failed:
            return result
        for rank, answer in failed:
            if "fault" in answer:
                raise LostError(f"rank {rank} on {answer['host']} failed: {answer['fault']}")
        if len(failed) == self.world and len({answer["error"] for _, answer in failed}) == 1:
            text = failed[0][1]["error"]
        else:
            rank, answer = failed[0]
            more = f"\n(and {len(failed) - 1} more of {self.world} ranks)" if len(failed) > 1 else ""
            text = f"rank {rank} on {answer['host']}: {answer['error']}{hint}{more}"
        raise (UserError if self.main else EchoError)(text)

    def _tell(self, answer: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(answer).encode() if self.main else b""
        size = torch.tensor([len(text)])
        dist.broadcast(size, 0, group=self.waiting)
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if self.main else torch.empty(int(size)).byte()
        dist.broadcast(data, 0, group=self.waiting)
        return json.loads(bytes(data.tolist()))

    def _gather(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """The answers of all ranks, in their order, on every rank."""
        text = json.dumps(answer).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(text)]), group=self.waiting)
        longest = int(max(sizes))
        found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
        own = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
        dist.all_gather(found, own, group=self.waiting)
        return [json.loads(bytes(one.tolist())) for one in found]


def _failure(error: Exception) -> dict[str, str]:
    """What the other ranks are to know of it."""
    if isinstance(error, UserError):
        return {"error": str(error), "host": socket.gethostname()}
    return {"fault": f"{type(error).__name__}: {error}", "host": socket.gethostname()}


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
            f"torchrun --local-addr=127.0.0.1 --nproc-per-node=N -m stack.train parallel={kind}"
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **_meeting_place())
    try:
        waiting = dist.new_group(backend="gloo", timeout=timedelta(days=7))
        yield Ranks(dist.get_rank(), dist.get_world_size(), local, waiting)
    except BaseException as error:
        # Not now: the others would tell that this rank is gone before it has told why.
        atexit.register(dist.destroy_process_group)
        if isinstance(error, RuntimeError) and "gloo" in str(error):
            raise LostError(f"another rank is gone; what it says is the cause ({str(error).strip()})") from None
        raise
    else:
        dist.destroy_process_group()
