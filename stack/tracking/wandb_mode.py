"""Whether a run goes to wandb, and how: what settings, environment, key and network come to, before any work."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from stack.config.schema import Track
from stack.core.errors import UserError

ANSWER_S = 5.0  # for the host to take a connection


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
