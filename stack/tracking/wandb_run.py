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
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from stack.config.schema import FineTune, Run, Track, UserError, is_given, plain
from stack.core import files
from stack.tracking.metrics import MEASURED

if TYPE_CHECKING:
    import wandb

FLUSH_S = 1.0  # what a killed process loses at most; wandb's own default is 15 s
ANSWER_S = 5.0  # for the host to take a connection
INIT_S = 30.0  # for it to make the run; offline after that
FINISH_S = 60.0  # for what is left to be uploaded at the end
WAITING = 10_000  # rows that may wait for wandb; more are lost and counted
TABLE_COLUMNS = ("step", "tokens", "text")


def choose_mode(track: Track, folder: Path, show: Callable[[str], None]) -> str:
    """What ``track.mode`` comes to for a run, ``online``, ``offline`` or ``disabled``; one line says why.

    To be called before any work.

    Raises:
        UserError: as :func:`decide` does.
    """
    mode, why = decide(track, folder, show)
    if mode == "offline":
        show(f"wandb: offline, {why}: {folder}/wandb (look: wandb leet {folder}/wandb)")
    elif why:
        show(f"wandb: {mode}, {why}")
    return mode


def decide(track: Track, folder: Path, show: Callable[[str], None]) -> tuple[str, str]:
    """``online``, ``offline`` or ``disabled``, and why it is not online.

    Asks for no key, whatever the terminal, and takes well under a second where none is there. From here on wandb
    writes nothing outside of ``folder``. What is wrong with wandb alone costs the run nothing: variables of its that
    are broken are passed over with a line, a broken key or installation is why it is offline or disabled.

    Raises:
        UserError: something is wrong, or there is no key, and an online mode was asked for.
    """
    wanted, asked = _wanted(track)
    if wanted == "disabled":
        return wanted, ""
    _stay_at_home(folder)
    try:
        passed_over = _mended_environment()
    except Exception as error:  # whatever a broken installation raises
        if wanted == "online":
            raise UserError(
                f"{asked}, but wandb cannot be used: {_first_line(error)}; or use track.mode=offline"
            ) from error
        return "disabled", f"as it cannot be used: {_first_line(error)}"
    if passed_over and wanted == "online":
        raise UserError(f"{asked}, but {'; '.join(passed_over)}; mend or unset it, or use track.mode=offline")
    for line in passed_over:
        show(f"wandb: passed over: {line}")
    if wanted == "offline":
        return wanted, "as it is asked to be"
    key, host, why = _key_and_host()
    if not key and wanted == "online":
        raise UserError(
            f"{asked}, but {why or f'there is no key for {host}'}: set WANDB_API_KEY, or call `wandb login`; "
            "or use track.mode=offline, and `wandb sync` later"
        )
    if not key:
        why = f"as {why or f'there is no key for {host}'}"
    elif wanted == "auto":
        why = _unreachable(host)
    return ("offline", why) if why else ("online", "")


def _wanted(track: Track) -> tuple[str, str]:
    """``online``, ``offline``, ``disabled`` or ``auto``, and the words that ask for it.

    ``track.mode`` comes first, then wandb's own variables; an empty one is none.
    """
    if track.mode != "auto":
        return track.mode, f"track.mode={track.mode}"
    if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes", "on", "t", "y"):
        return "disabled", "WANDB_DISABLED"
    said = os.environ.get("WANDB_MODE", "")
    known = {"online": "online", "run": "online", "shared": "online", "offline": "offline", "dryrun": "offline"}
    known |= {"disabled": "disabled"}
    return known.get(said, "auto"), f"WANDB_MODE={said}"


def _mended_environment() -> list[str]:
    """One line for each variable that wandb would fail over; it is unset for this process and those that it starts.

    What is broken otherwise, its settings or its installation, raises whatever it raises.
    """
    import wandb
    from pydantic import ValidationError

    lines = []

    def unset(name: str, error: Exception) -> None:
        del os.environ[name]
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else _first_line(error)
        lines.append(f"{name} ({why})")  # never its value, which may be a secret

    for name, value in [(name, value) for name, value in os.environ.items() if name.startswith("WANDB_")]:
        if not value.strip():
            del os.environ[name]  # as good as unset
            continue
        try:
            wandb.Settings().update_from_env_vars({name: value})
        except Exception as error:  # of its parsers, each with its own
            unset(name, error)
    try:
        _set_up()
    except Exception as error:
        if "WANDB_SERVICE" not in os.environ:
            raise
        unset("WANDB_SERVICE", error)
        wandb.teardown()
        _set_up()
    return lines


def _set_up() -> str:
    """Has wandb read its settings and reach its service, if there is one already; the host that keys are for."""
    import wandb

    # Silent: what it would say is looked up on the server. Online: WANDB_MODE=offline would hide the key.
    return wandb.setup(wandb.Settings(silent=True, mode="online")).settings.base_url


def _first_line(error: object) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _key_and_host() -> tuple[bool, str, str]:
    """Whether there is a key, the address that it is for, and what is wrong with it. No prompt and no network."""
    import wandb

    host = _set_up()
    try:
        return wandb.login(prompt=False, verify=False), host, ""
    except Exception as error:  # of the key, or of a file of keys that is no text
        return False, host, f"the key for {host} cannot be read ({_first_line(error)})"


def _unreachable(url: str) -> str:
    """Why no connection to ``url`` can be made; empty where one can, or where a proxy is asked in our place."""
    parts = urlsplit(url)
    if parts.scheme in urllib.request.getproxies():
        return ""
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=ANSWER_S).close()
    except OSError as error:
        return f"as {url} cannot be reached ({error})"
    return ""


def _stay_at_home(folder: Path) -> None:
    """What wandb would put below the home directory goes into the run's folder; no report of its errors is sent."""
    home = folder.absolute() / "wandb"
    for name, value in (("DATA_DIR", home / "data"), ("CACHE_DIR", home / "cache"), ("ERROR_REPORTING", "false")):
        os.environ.setdefault(f"WANDB_{name}", str(value))


class WandbRun:
    """A run of wandb on rank 0.

    Args:
        folder: the run's; wandb's files lie below ``folder/wandb``.
        mode: ``online`` or ``offline``, as :func:`choose_mode` gives it; online falls back to offline.
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
