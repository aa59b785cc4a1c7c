"""``python -m stack.chat``: talks to a checkpoint, in a terminal or for one answer.

One shot with ``prompt=``, ``prompt_file=`` or piped standard input: standard output holds the answer and nothing else.
A base without chat tokens continues each text by itself instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stack.checkpoint.open import build, has_template, load_base
from stack.config.entry import entry
from stack.config.schema import Chat
from stack.core.errors import UserError
from stack.core.machine import choose_device
from stack.evaluation.console import interactive, note, one_shot
from stack.evaluation.session import ChatSession


def run(config: Chat) -> int:
    """Opens the model and talks; returns the exit code."""
    text = _one_text(config)
    system = _plain("system", (config.system or "").encode(errors="surrogateescape"))
    if text == "":
        raise UserError("the prompt is empty; give some text with prompt=, prompt_file= or standard input")
    base = load_base(config.checkpoint, config.runs_dir, note)
    session = ChatSession(build(base).to(choose_device(config.device)), base.tokenizer, config, note)
    session.set_system(system)
    if session.completes:
        unused = "; its own chat template is not used" if has_template(base.folder) else ""
        note(f"{base.folder} has no chat tokens: the text is continued, not answered{unused}")
    sys.stdout.reconfigure(encoding="utf-8")
    return interactive(session) if text is None else one_shot(session, text)


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


main = entry("chat", Chat, run, positional="checkpoint", forgives=False)

if __name__ == "__main__":
    main()
