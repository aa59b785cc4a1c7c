"""Texts and conversations to ids in several processes, in order and in constant memory.

It stands alone so that a worker, which imports this module and not the command's, loads neither ``datasets`` nor
``torch`` nor ``wandb``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeVar

import numpy as np

from stack.core.errors import UserError
from stack.text import conversation
from stack.text import tokenizer as tokenizers
from stack.text.messages import Message
from stack.text.tokenizer import Tokenizer


class Encoded(NamedTuple):
    """The ids of a text or of a conversation, without the ``<|endoftext|>`` in front."""

    ids: np.ndarray  # uint16 or uint32 [n]
    supervised: np.ndarray | None = None  # of a conversation: uint8 [n], 1 where an id is supervised
    left_out: int = 0  # ids of a conversation that were too many for a window; all of them where nothing is left


Item = TypeVar("Item")
Content = str | list[Message] | None  # a text, a conversation, or nothing to encode
Encode = Callable[[Iterable[tuple[Item, Content]]], Iterator[tuple[Item, Encoded]]]
# A call of a worker takes texts until they have this many characters, or are this many …
TASK_CHARACTERS, TASK_TEXTS = 1_000_000, 2_000
AHEAD = 3  # … and so many calls a worker are under way or waiting to be written: this bounds the memory.


def id_dtype(num_rows: int) -> np.dtype:
    """The smallest type on disk that holds every id below ``num_rows``: uint16 or uint32, little-endian."""
    return np.dtype("<u2" if num_rows <= 2**16 else "<u4")


@contextmanager
def encoder(tokenizer: Tokenizer, workers: int, window: int = 0, cut: bool = False) -> Iterator[Encode]:
    """A function that turns pairs (item, content) into pairs (item, encoded), in their order; no content, no ids.

    With one worker this process encodes, on the tokenizer's own threads; 0 stands for one worker a processor. A
    conversation of more than ``window`` ids, the ``<|endoftext|>`` in front counted, is ``cut`` or left out. UserError
    when a worker dies.
    """
    workers = workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if workers == 1:
        yield lambda pairs: (
            pair for task in _tasks(pairs) for pair in _paired(task, _encode(tokenizer, _contents(task), window, cut))
        )
        return
    settings = (str(tokenizer.folder), window, cut)
    pool = ProcessPoolExecutor(workers, _Light(), _start, settings)
    try:
        yield lambda pairs: _encode_ahead(pool, workers, pairs)
    except BrokenProcessPool as error:
        group = "chat" if window else "data"
        raise UserError(
            f"one of {workers} encoding processes died, most likely for want of memory; lower {group}.workers={workers}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class _LightProcess(SpawnProcess):
    """A new process that does not import the parent's main module: that of a command imports all there is."""

    def start(self) -> None:
        """Start it while the main module looks like an interpreter's without a program."""
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main


class _Light(SpawnContext):
    Process = _LightProcess


def _encode_ahead(
    pool: ProcessPoolExecutor, workers: int, pairs: Iterable[tuple[Item, Content]]
) -> Iterator[tuple[Item, Encoded]]:
    waiting: deque[tuple[list[tuple[Item, Content]], Future[list[Encoded]]]] = deque()
    for task in _tasks(pairs):
        waiting.append((task, pool.submit(_work, _contents(task))))
        if len(waiting) >= AHEAD * workers:
            oldest, result = waiting.popleft()
            yield from _paired(oldest, result.result())
    for task, result in waiting:
        yield from _paired(task, result.result())


def _tasks(pairs: Iterable[tuple[Item, Content]]) -> Iterator[list[tuple[Item, Content]]]:
    """The pairs in portions for one call each."""
    task: list[tuple[Item, Content]] = []
    size = 0
    for item, content in pairs:
        task.append((item, content))
        size += len(str(content or ""))
        if size >= TASK_CHARACTERS or len(task) >= TASK_TEXTS:
            yield task
            task, size = [], 0
    yield task


def _contents(task: list[tuple[Item, Content]]) -> list[str] | list[list[Message]]:
    return [content for _, content in task if content is not None]


def _paired(task: list[tuple[Item, Content]], encoded: list[Encoded]) -> Iterator[tuple[Item, Encoded]]:
    found = iter(encoded)
    nothing = Encoded(np.zeros(0, dtype=np.uint16))
    for item, content in task:
        yield item, nothing if content is None else next(found)


def _encode(tokenizer: Tokenizer, contents: list[str] | list[list[Message]], window: int, cut: bool) -> list[Encoded]:
    """Ids of each text or conversation; one that does not fit its type raises OverflowError, it never wraps."""
    dtype = id_dtype(tokenizer.vocab_size)
    if not contents or isinstance(contents[0], str):
        return [Encoded(np.array(ids, dtype=dtype)) for ids in tokenizer.encode_batch(contents)]
    found = []
    for ids, supervised in conversation.encode_batch(tokenizer, contents):
        fitting = conversation.fit(supervised, window) if cut or len(ids) <= window else None
        kept = slice(1, fitting or 0)
        left_out = len(ids) - (fitting or 0)
        found.append(Encoded(np.array(ids[kept], dtype=dtype), np.array(supervised[kept], dtype=np.uint8), left_out))
    return found


# ---------------------------------------------------------------------------------------------------- in the workers

_settings: tuple[Tokenizer, int, bool]


def _start(folder: str, window: int, cut: bool) -> None:
    """Load the tokenizer once a process; leave interrupts to the parent, and end when it is gone."""
    global _settings
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _settings = tokenizers.load(Path(folder)), window, cut


def _end_with_parent() -> None:
    # A killed parent closes no queue: its workers would wait for the next task for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(contents: list[str] | list[list[Message]]) -> list[Encoded]:
    tokenizer, window, cut = _settings
    return _encode(tokenizer, contents, window, cut)
