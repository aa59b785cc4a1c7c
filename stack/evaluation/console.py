"""A chat in a terminal, or one answer on standard output."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty

from stack.core.errors import UserError
from stack.evaluation.session import ChatSession

HELP = """/reset        forgets the conversation
/system TEXT  sets the system turn; without TEXT there is none
/help         shows this
/quit         leaves, as Ctrl-D does
Ctrl-C stops an answer. What is pasted is one message. A blank in front makes a message of what begins with a slash."""
PASTE_SECONDS = 0.03  # what follows a line sooner was pasted with it, not typed
INTERRUPTED, READER_LEFT = 130, 141  # exit codes of a shell for SIGINT and SIGPIPE
# A terminal would obey these; an answer shows them as U+FFFD there.
COMMANDS_OF_A_TERMINAL = {i: "\ufffd" for i in (*range(0x20), *range(0x7F, 0xA0)) if chr(i) not in "\n\t"}


def note(line: str) -> None:
    """Says something that is no answer."""
    print(line, file=sys.stderr, flush=True)


def one_shot(session: ChatSession, text: str) -> int:
    """The answer to one text; returns the exit code."""
    try:
        session.answer(text, _write)
        _write("\n")
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at the end
        return READER_LEFT
    return 0


def interactive(session: ChatSession) -> int:
    """A conversation, until somebody leaves; returns the exit code."""
    with contextlib.suppress(ImportError):  # some builds of Python have none; input() works without, too
        import readline

        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    note("/help lists the commands, /quit leaves")
    warned = False
    while True:
        try:
            text = _read()
        except EOFError:
            _write("\n")
            return 0
        except KeyboardInterrupt:
            note("" if warned else "\nCtrl-C once more leaves")
            if warned:
                return INTERRUPTED
            warned = True
            continue
        warned = False
        if text.split() == ["/quit"]:
            return 0
        try:
            _command(session, text) if text.startswith("/") and "\n" not in text else _say(session, text)
        except UserError as error:
            note(f"error: {error}")


def _command(session: ChatSession, line: str) -> None:
    word, _, text = line.partition(" ")
    if word == "/reset":
        session.turns.clear()
        session.told = False
    elif word == "/system":
        session.set_system(text.strip())
    else:
        note(HELP if word == "/help" else f"{word}: there is no such command\n{HELP}")


def _say(session: ChatSession, text: str) -> None:
    if not text.strip():
        return
    try:
        session.answer(text, _write)
    except KeyboardInterrupt:
        note("\n(stopped)")
    else:
        _write("\n")


def _read() -> str:
    """A message from the terminal.

    Most terminals mark what is pasted, and readline takes it for one line. Where they do not, or there is another
    readline, what follows a line at once belongs to it.
    """
    line = input("> ")
    return line if line.startswith("/") else line + _rest_of_paste()


def _rest_of_paste() -> str:
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    data = b""
    tty.setcbreak(terminal, termios.TCSANOW)  # a last line without its end is read as well
    try:
        while select.select([terminal], [], [], PASTE_SECONDS)[0] and (some := os.read(terminal, 1 << 16)):
            data += some
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
    rest = data.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")
    if data:
        _write(f"{rest}\n")  # as if it had been typed
    return f"\n{rest}" if data else ""


def _write(piece: str) -> None:
    sys.stdout.write(piece.translate(COMMANDS_OF_A_TERMINAL) if sys.stdout.isatty() else piece)
    sys.stdout.flush()
