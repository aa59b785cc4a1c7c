"""wandb beside ``metrics.jsonl``: a run that is fed from a thread of its own, so that it can stop nothing.

Rows are handed over and the training goes on; what wandb does with them, however long it takes and whatever it raises,
happens in the thread. Failures are counted (``time/tracking_failures``) and the first one is told. ``step`` and
``tokens`` are ordinary metrics and the axes of all others; wandb's own step is never given, as it refuses to go back
when a run goes on from an earlier checkpoint.

A run keeps its id in ``runs/NAME/wandb.json``. Offline every start writes its own folder,
``runs/NAME/wandb/offline-run-TIME-ID``; folders of one id are one run, and where two have a step the later one holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stack.config.command import is_given
from stack.config.schema import FineTune, Run, plain
from stack.core import files
from stack.tracking.metrics import MEASURED

if TYPE_CHECKING:
    import wandb

FLUSH_S = 1.0  # what a killed process loses at most; wandb's own default is 15 s
INIT_S = 30.0  # for it to make the run; offline after that
FINISH_S = 60.0  # for what is left to be uploaded at the end
WAITING = 10_000  # rows that may wait for wandb; more are lost and counted
TABLE_COLUMNS = ("step", "tokens", "text")


class WandbRun:
    """A run of wandb on rank 0.

    Args:
        folder: the run's; wandb's files lie below ``folder/wandb``.
        mode: ``online`` or ``offline``, as :mod:`stack.tracking.wandb_mode` chooses; online falls back to offline.
        config: the typed configuration.
        resolved: what was fixed from it, with the digests of all that the run is made from.
        offset: bytes of ``metrics.jsonl`` that the run has behind it; its tables of texts begin with what is there.
        show: tells a person one line.
    """

    def __init__(
        self,
        folder: Path,
        mode: str,
        config: Run,
        resolved: dict[str, Any],
        offset: int,
        show: Callable[[str], None],
    ):
        self.folder, self.mode, self.config, self.resolved, self.show = folder, mode, config, resolved, show
        self._offset = offset
        self.failures = 0
        self._axes: set[str] = set()  # sections whose axis is defined
        self._tables: dict[str, list[list[Any]]] = {}
        self._queue: queue.Queue[Callable[[Any], None] | None] = queue.Queue(WAITING)
        self._exit_code = 0
        self._seen = time.monotonic()
        self._stalled = False
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------------------- from the training thread

    def log(self, row: dict[str, Any]) -> None:
        """Hands over one row of ``metrics.jsonl``. Returns at once."""
        self._hand(lambda run: self._log(run, row))

    def alert(self, title: str, text: str, level: str) -> None:
        """Hands over an alert. Returns at once."""
        self._hand(lambda run: run.alert(title, text, level=level))

    def alive(self) -> None:
        """There is progress; an alert says so where it stays away for ``track.stall_minutes``."""
        self._seen = time.monotonic()
        self._stalled = False

    def finish(self, exit_code: int) -> None:
        """Waits until everything is written, and uploaded where the run is online; at most about a minute."""
        self._exit_code = exit_code
        end = time.monotonic() + INIT_S + FINISH_S
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=INIT_S + FINISH_S)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            self._failed("finish", f"not done after {INIT_S + FINISH_S:.0f} s")

    def _hand(self, work: Callable[[Any], None]) -> None:
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self._failed("log", f"{WAITING} rows wait for it")

    # ---------------------------------------------------------------------------------------- in its own thread

    def _work(self) -> None:
        self._guarded("tables", self._read_tables)
        run = self._guarded("init", self._init)
        while (work := self._next(run)) is not None:
            if run is not None:
                self._guarded("log", lambda work=work: work(run))
        if run is not None:
            self._guarded("finish", lambda: run.finish(exit_code=self._exit_code))

    def _next(self, run: Any) -> Callable[[Any], None] | None:
        """The next thing to do; meanwhile looks whether the training stands still."""
        while True:
            try:
                return self._queue.get(timeout=1.0)
            except queue.Empty:
                limit = self.config.track.stall_minutes * 60
                if limit and not self._stalled and time.monotonic() - self._seen > limit:
                    self._stalled = True
                    text = f"{self.config.name}: no step for {self.config.track.stall_minutes:g} minutes"
                    self.show(text)
                    if run is not None:
                        self._guarded("alert", lambda text=text: run.alert("stalled", text, level="WARN"))

    def _init(self) -> Any:
        import wandb

        if self.mode == "online":
            try:
                return self._begin(wandb, "online")
            except Exception as error:
                self._failed("online", f"{error}".splitlines()[0] + "; it goes on offline")
                wandb.teardown()  # its service would mix the two runs of one id up, and write neither
        return self._begin(wandb, "offline")

    def _begin(self, wandb: Any, mode: str) -> wandb.Run:
        run = wandb.init(
            mode=mode,
            dir=str(self.folder.absolute()),
            project=_setting("track.project", "WANDB_PROJECT", self.config.track.project),
            entity=self.config.track.entity,  # else WANDB_ENTITY: wandb reads it, its group, tags and notes itself
            name=_setting("name", "WANDB_NAME", self.config.name),
            job_type="sft" if isinstance(self.config, FineTune) else "train",
            id=_id(self.folder),
            resume="allow",
            config={**plain(self.config), "resolved": self.resolved},
            allow_val_change=True,
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                x_save_requirements=False,
                x_transaction_log_flush_interval=FLUSH_S,
                init_timeout=INIT_S,
                finish_timeout=FINISH_S,
            ),
        )
        for axis in ("step", "tokens"):
            run.define_metric(axis, hidden=True)
        if mode == "online":
            self.show(f"wandb: {run.url}")
        return run

    def _log(self, run: Any, row: dict[str, Any]) -> None:
        values: dict[str, Any] = {}
        for key, value in row.items():
            section, slash, _ = key.partition("/")
            if slash and section not in self._axes:
                # One pattern a section: where two fit a key, it is not said which of them holds.
                run.define_metric(f"{section}/*", step_metric="step" if key.startswith(MEASURED) else "tokens")
                self._axes.add(section)
            try:
                values |= _histogram(key, value) if _is_histogram(value) else {key: value}
            except Exception as error:
                self._failed(key, error)
        for key in self._grow_tables(row):
            import wandb

            values[key] = wandb.Table(list(TABLE_COLUMNS), [list(entry) for entry in self._tables[key]])
        run.log(values)

    def _read_tables(self) -> None:
        """The texts of the rows that the run has behind it."""
        with open(self.folder / "metrics.jsonl", "rb") as file:
            for line in file.read(self._offset).splitlines():
                if b'": ["' in line:
                    self._grow_tables(json.loads(line))

    def _grow_tables(self, row: dict[str, Any]) -> list[str]:
        """Adds the texts of a row to the table of their key; the keys that have any."""
        keys = [key for key, value in row.items() if _is_texts(value)]
        for key in keys:
            self._tables.setdefault(key, []).extend([row.get("step"), row.get("tokens"), text] for text in row[key])
        return keys

    def _guarded(self, what: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            self._failed(what, error)

    def _failed(self, what: str, error: object) -> None:
        self.failures += 1
        if self.failures == 1:
            self.show(
                f"wandb: {what}: {error} (training goes on, metrics.jsonl is complete; "
                "more failures are only counted, in time/tracking_failures)"
            )


def _is_histogram(value: Any) -> bool:
    return isinstance(value, dict) and {"counts", "edges"} <= value.keys()


def _histogram(key: str, value: dict[str, Any]) -> dict[str, Any]:
    """``{"counts": [n], "edges": [n + 1], …}`` as wandb's histogram, and what else is counted beside it.

    Without a bin (no finite value) there is no histogram.
    """
    import wandb

    others = {f"{key}_{name}": entry for name, entry in value.items() if name not in ("counts", "edges")}
    if not len(value["counts"]):
        return others
    return {key: wandb.Histogram(np_histogram=(list(value["counts"]), list(value["edges"]))), **others}


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _setting(flag: str, variable: str, value: str) -> str:
    """What the command line says comes first, then wandb's variable, then our default."""
    return value if is_given(flag) else os.environ.get(variable) or value


def _id(folder: Path) -> str:
    """The id of the run, kept from its first start on: that of ``WANDB_RUN_ID``, or a new one."""
    path = folder / "wandb.json"
    if path.exists():
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    made = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
    files.replace(path, json.dumps({"id": made}) + "\n")
    return made
