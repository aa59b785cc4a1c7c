"""``python -m stack.chat``: talks to a checkpoint, in a terminal or for one answer.

One shot with ``prompt=``, ``prompt_file=`` or piped standard input: standard output holds the answer and nothing else.
A base without chat tokens continues each text by itself instead.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from pathlib import Path

from stack.checkpoint.open import build, has_template, load_base
from stack.config.entry import entry
from stack.config.schema import Chat
from stack.core.errors import UserError
from stack.core.machine import choose_device
from stack.evaluation.session import Talk

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


def run(config: Chat) -> int:
    """Opens the model and talks; returns the exit code."""
    text = _one_text(config)
    system = _plain("system", (config.system or "").encode(errors="surrogateescape"))
    if text == "":
        raise UserError("the prompt is empty; give some text with prompt=, prompt_file= or standard input")
    base = load_base(config.checkpoint, config.runs_dir, note)
    talk = Talk(build(base).to(choose_device(config.device)), base.tokenizer, config, note)
    talk.set_system(system)
    if talk.completes:
        unused = "; its own chat template is not used" if has_template(base.folder) else ""
        note(f"{base.folder} has no chat tokens: the text is continued, not answered{unused}")
    sys.stdout.reconfigure(encoding="utf-8")
    return _interactive(talk) if text is None else _one_shot(talk, text)


def _one_text(config: Chat) -> str | None:
    """What is to be answered in one shot; None in a terminal. One line end at the end of a file is not part of it."""
    if config.prompt is not None:
        return _plain("prompt", config.prompt.encode(errors="surrogateescape"))
    if config.prompt_file is not None:
        name = f"prompt_file={config.prompt_file}"
        try:
            data = Path(config.prompt_file).read_bytes()
        except OSError as error:
            raise UserError(f"{name}: cannot be read ({error.strerror}); give the path of a text file") from error
    elif sys.stdin is None:
        return ""
    elif sys.stdin.isatty():
        return None
    else:
        name, data = "standard input", sys.stdin.buffer.read()
    text = _plain(name, data)
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _plain(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        what = f"{name}: byte {error.start} is {data[error.start]:#04x}"
        raise UserError(f"{what}, so this is no UTF-8 text; convert it first") from error


def _one_shot(talk: Talk, text: str) -> int:
    try:
        talk.answer(text, _write)
        _write("\n")
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at the end
        return READER_LEFT
    return 0


def _interactive(talk: Talk) -> int:
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
            _command(talk, text) if text.startswith("/") and "\n" not in text else _say(talk, text)
        except UserError as error:
            note(f"error: {error}")


def _command(talk: Talk, line: str) -> None:
    word, _, text = line.partition(" ")
    if word == "/reset":
        talk.turns.clear()
        talk.told = False
    elif word == "/system":
        talk.set_system(text.strip())
    else:
        note(HELP if word == "/help" else f"{word}: there is no such command\n{HELP}")


def _say(talk: Talk, text: str) -> None:
    if not text.strip():
        return
    try:
        talk.answer(text, _write)
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


main = entry("chat", Chat, run, positional="checkpoint", forgives=False)

if __name__ == "__main__":
    main()
