"""Texts to ids in several processes, in order and in constant memory.

It stands alone so that a worker, which imports this module, loads neither ``datasets`` nor ``torch``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from stack import tokenizer as tokenizers
from stack.config import UserError
from stack.tokenizer import Tokenizer

Item = TypeVar("Item")
Encode = Callable[[Iterable[tuple[Item, str | None]]], Iterator[tuple[Item, np.ndarray]]]
# A call of a worker takes texts until they have this many characters, or are this many …
TASK_CHARACTERS, TASK_TEXTS = 1_000_000, 2_000
AHEAD = 3  # … and so many calls a worker are under way or waiting to be written: this bounds the memory.


def id_dtype(num_rows: int) -> np.dtype:
    """The smallest type on disk that holds every id below ``num_rows``: uint16 or uint32, little-endian."""
    return np.dtype("<u2" if num_rows <= 2**16 else "<u4")


@contextmanager
def encoder(tokenizer: Tokenizer, workers: int) -> Iterator[Encode]:
    """A function that turns pairs (item, text) into pairs (item, ids), in their order; no text, no ids.

    With one worker this process encodes, on the tokenizer's own threads; 0 stands for one worker a processor. UserError
    when a worker dies.
    """
    workers = workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if workers == 1:
        yield lambda pairs: (pair for task in _tasks(pairs) for pair in _paired(task, _encode(tokenizer, _texts(task))))
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (str(tokenizer.folder),))
    try:
        yield lambda pairs: _encode_ahead(pool, workers, pairs)
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {workers} encoding processes died, most likely for want of memory; lower data.workers={workers}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _encode_ahead(
    pool: ProcessPoolExecutor, workers: int, pairs: Iterable[tuple[Item, str | None]]
) -> Iterator[tuple[Item, np.ndarray]]:
    waiting: deque[tuple[list[tuple[Item, str | None]], Future[list[np.ndarray]]]] = deque()
    for task in _tasks(pairs):
        waiting.append((task, pool.submit(_work, _texts(task))))
        if len(waiting) >= AHEAD * workers:
            oldest, result = waiting.popleft()
            yield from _paired(oldest, result.result())
    for task, result in waiting:
        yield from _paired(task, result.result())


def _tasks(pairs: Iterable[tuple[Item, str | None]]) -> Iterator[list[tuple[Item, str | None]]]:
    """The pairs in portions for one call each."""
    task: list[tuple[Item, str | None]] = []
    size = 0
    for item, text in pairs:
        task.append((item, text))
        size += len(text or "")
        if size >= TASK_CHARACTERS or len(task) >= TASK_TEXTS:
            yield task
            task, size = [], 0
    yield task


def _texts(task: list[tuple[Item, str | None]]) -> list[str]:
    return [text for _, text in task if text is not None]


def _paired(task: list[tuple[Item, str | None]], encoded: list[np.ndarray]) -> Iterator[tuple[Item, np.ndarray]]:
    arrays = iter(encoded)
    nothing = np.zeros(0, dtype=np.uint16)
    for item, text in task:
        yield item, nothing if text is None else next(arrays)


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Ids of each text; one that does not fit its type raises OverflowError, it never wraps."""
    dtype = id_dtype(tokenizer.vocab_size)
    return [np.array(ids, dtype=dtype) for ids in tokenizer.encode_batch(texts)]


# ---------------------------------------------------------------------------------------------------- in the workers

_tokenizer: Tokenizer


def _start(folder: str) -> None:
    """Load the tokenizer once a process; leave interrupts to the parent, and end when it is gone."""
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizer = tokenizers.load(Path(folder))


def _end_with_parent() -> None:
    # A killed parent closes no queue: its workers would wait for the next task for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(texts: list[str]) -> list[np.ndarray]:
    return _encode(_tokenizer, texts)
