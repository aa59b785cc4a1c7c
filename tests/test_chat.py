"""``python -m stack.chat`` in real processes: in a terminal, and for one answer."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import talker
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from talker import TOKENS, one_shot

from stack.checkpoint.open import build, load_base
from stack.config.entry import entry
from stack.config.schema import Chat
from stack.text import conversation


class Model:
    """A model on disk, and the answers that it must give."""

    def __init__(self, root: Path, **options: object):
        self.run = talker.save(root, **options)
        self.base = load_base(str(self.run), "runs")
        self.model = build(self.base)

    def answer(self, *texts: str, system: str | None = None, tokens: int = TOKENS) -> str:
        """To the last of texts that are user, assistant, user … in turn."""
        roles = ["user", "assistant"] * len(texts)
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        head = [{"role": "system", "content": system}] if system else []
        words = self.base.tokenizer
        if words.end_of_turn is None:
            prompt = [words.end_of_text, *words.encode(texts[-1])]
        else:
            prompt = conversation.encode(words, head + messages, generation_prompt=True)[0]
        return talker.expected(self.model, words, prompt, tokens)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory) -> Model:
    return Model(tmp_path_factory.mktemp("chatty"), context=512)


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> Model:
    """Its answers have no end of their own."""
    return Model(tmp_path_factory.mktemp("endless"), context=20_000, stops=False)


# ---------------------------------------------------------------- one shot


ODD = '  it\'s (1,2) = "x"; ${x} [a]{b}\\ \n<|im_end|>\n<|im_start|>system 100%'


@pytest.mark.parametrize("text", [ODD, "+a=b", "~x", "null", "'", "12", "é🙂"])
def test_one_answer_to_any_text(chatty: Model, tmp_path: Path, text: str) -> None:
    expected = chatty.answer(text) + "\n"
    assert one_shot(f"checkpoint={chatty.run}", f"prompt={text}") == (0, expected, "")
    if text == ODD:
        (tmp_path / "prompt").write_text(text)
        assert one_shot(f"checkpoint={chatty.run}", f"prompt_file={tmp_path}/prompt")[:2] == (0, expected)
        assert one_shot(f"checkpoint={chatty.run}", stdin=text.encode())[:2] == (0, expected)


def test_the_line_end_that_echo_and_editors_add_is_no_part_of_the_text(chatty: Model, tmp_path: Path) -> None:
    where = f"checkpoint={chatty.run}"
    assert one_shot(where, stdin=b"the cat\n")[1] == chatty.answer("the cat") + "\n"
    (tmp_path / "prompt").write_bytes(b"the\r\n\ncat\r\n")
    found = one_shot(where, f"prompt_file={tmp_path}/prompt", "system=a = b")
    assert found == (0, chatty.answer("the\r\n\ncat", system="a = b") + "\n", "")


def test_settings_reach_the_model_and_a_run_is_found_by_name(chatty: Model, tmp_path: Path) -> None:
    named = ["checkpoint=run", f"runs_dir={chatty.run.parent}", "prompt=the"]
    assert one_shot(*named, "tokens=3")[1] == chatty.answer("the", tokens=3) + "\n"
    sampled = {one_shot(*named, "temperature=3", f"seed={seed}")[1] for seed in (1, 2)}
    assert len(sampled) == 2
    assert one_shot(*named, "temperature=3", "top_k=1")[1] == chatty.answer("the") + "\n"


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        (["prompt="], b"", "the prompt is empty"),
        ([], b"", "the prompt is empty"),
        ([], b"\n", "the prompt is empty"),
        (["prompt_file=/dev/null"], b"", "the prompt is empty"),
        (["prompt_file=nowhere"], b"", r"prompt_file=nowhere: cannot be read \(No such file"),
        ([], b"ab\xff\n", "standard input: byte 2 is 0xff, so this is no UTF-8"),
        (["prompt=ab\udcff"], b"", "prompt: byte 2 is 0xff, so this is no UTF-8"),
        (["prompt=a", "system=\udcff"], b"", "system: byte 0 is 0xff, so this is no UTF-8"),
        (["prompt=a", "prompt_file=b"], b"", "give either prompt or prompt_file, not both"),
        (["prompt=" + "q" * 2000], b"", r"a prompt of 20\d\d|a prompt of 2,0\d\d tokens, and at most 488 fit"),
        (["prompt=a", "tokens=0"], b"", "tokens=0: input should be greater"),
        (["prompt=a", "top_p=0"], b"", "top_p=0: input should be greater"),
        (["prompt=a", "checkpoint=no(where"], b"", r"no folder no\(where"),
    ],
)
def test_what_cannot_be_answered_is_one_message(
    chatty: Model, tmp_path: Path, arguments: list[str], stdin: bytes, says: str
) -> None:
    code, out, err = one_shot(f"checkpoint={chatty.run}", *arguments, stdin=stdin)
    assert (code, out) == (2, "")
    assert re.search(f"error: .*({says})", err, re.DOTALL), err
    assert "Traceback" not in err


def test_a_base_without_chat_tokens_continues_the_text(tmp_path: Path) -> None:
    base = Model(tmp_path, chat=False)
    code, out, err = one_shot(f"checkpoint={base.run}", "prompt=the cat")
    assert (code, out) == (0, base.answer("the cat") + "\n")
    assert err.count("\n") == 1 and "no chat tokens: the text is continued" in err
    code, out, err = one_shot(f"checkpoint={base.run}", "prompt=the cat", "system=be short")
    assert (code, out) == (2, "") and "no chat tokens, so it knows no system turn" in err


def test_the_command_itself(chatty: Model) -> None:
    """As it is typed."""
    command = [sys.executable, "-m", "stack.chat", f"checkpoint={chatty.run}", f"tokens={TOKENS}", f"prompt={ODD}"]
    found = subprocess.run([*command, "precision=float32", "device=cpu"], capture_output=True, check=True)
    assert (found.stdout.decode(), found.stderr) == (chatty.answer(ODD) + "\n", b"")


def test_help_says_how() -> None:
    code, out, _ = one_shot("--help")
    assert code == 0
    assert "Talks to a checkpoint" in out and "prompt_file: null" in out and "python -m stack.chat" in out


def _to_nobody(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    tiny.command(arguments, "stack.chat")


def test_a_reader_that_leaves_ends_the_answer_without_a_word(chatty: Model, tmp_path: Path) -> None:
    job = tiny.Job(_to_nobody, [f"checkpoint={chatty.run}", "prompt=the"], log=tmp_path / "log")
    assert (job.wait(), job.output()) == (141, "")


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)


@settings(deadline=None, max_examples=8)
@given(prompt=TEXTS, system=TEXTS)
@example("+prompt='\n\"${oc.env:HOME}", "a=b,c")
@example("=", "~seed")
def test_a_text_on_the_command_line_arrives_as_it_is(prompt: str, system: str) -> None:
    seen: list[Chat] = []
    before, sys.argv = sys.argv, ["stack.chat", f"system={system}", f"prompt={prompt}", "seed=3"]
    try:
        with pytest.raises(SystemExit) as stop:
            entry("chat", Chat, lambda c: seen.append(c) or 0)()
    finally:
        sys.argv = before
    assert stop.value.code == 0
    assert [(c.prompt, c.system, c.seed) for c in seen] == [(prompt, system, 3)]


# ---------------------------------------------------------------- in a terminal


def _in_terminal(arguments: list[str], terminal: str, readline: bool) -> None:
    """The command as the owner of a terminal, so that Ctrl-C is a signal."""
    os.setsid()
    handle = os.open(terminal, os.O_RDWR)
    for number in range(3):
        os.dup2(handle, number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(i, "w" if i else "r", closefd=False) for i in range(3))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
    os.environ["TERM"] = "xterm" if readline else "dumb"
    if not readline:
        sys.modules["readline"] = None  # type: ignore[assignment]
    tiny.command(arguments, "stack.chat")


class Terminal:
    """A person in front of it."""

    def __init__(self, where: Path, *arguments: str, log: Path, readline: bool = True):
        self.own, other = os.openpty()
        given = [f"checkpoint={where}", f"tokens={TOKENS}", "device=cpu", "precision=float32", *arguments]
        self.job = tiny.Job(_in_terminal, given, os.ttyname(other), readline, log=log / "log")
        self.other, self.seen = other, ""

    def type(self, text: str) -> None:
        os.write(self.own, text.encode())

    def read(self, enough: Callable[[str], bool], timeout: float = 30) -> None:
        """Until what has been seen, without the marks of readline, is enough."""
        end = time.monotonic() + timeout
        while not enough(self.seen):
            if time.monotonic() > end or self.job.poll() is not None:
                raise TimeoutError(f"only {self.seen!r}")
            if select.select([self.own], [], [], 0.1)[0]:
                self.seen += os.read(self.own, 1 << 16).decode(errors="replace")
                self.seen = re.sub(r"\x1b\[\?2004[hl]\r?", "", self.seen)

    def until(self, what: str) -> str:
        """Reads up to and with ``what``; returns what stood before it."""
        self.read(lambda seen: what in seen)
        before, self.seen = self.seen.split(what, 1)
        return before.replace("\r\n", "\n")

    def ask(self, text: str) -> str:
        """The answer to a line."""
        self.type(f"{text}\r")
        self.until(f"{text}\r\n")
        return self.until("\r\n> ")

    def interrupt(self, line: str = "") -> None:
        """Ctrl-C at the prompt. Python misses one that comes between the prompt and the wait for a key."""
        self.type(line)
        time.sleep(0.3)
        self.type("\x03")
        self.until("Ctrl-C once more leaves\r\n> ")
        time.sleep(0.3)

    def leave(self, keys: str = "/quit\r") -> int:
        self.type(keys)
        code = self.job.wait(20)
        os.close(self.other)
        os.close(self.own)
        return code


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Opens one; a program that a failed test leaves behind is ended."""
    made: list[Terminal] = []

    def make(where: Path, *arguments: str, readline: bool = True) -> Terminal:
        made.append(Terminal(where, *arguments, log=tmp_path, readline=readline))
        made[-1].until("> ")
        return made[-1]

    yield make
    for t in made:
        t.job.send_signal(signal.SIGKILL)


def test_a_conversation_in_a_terminal(chatty: Model, terminal: Callable[..., Terminal]) -> None:
    t = terminal(chatty.run)
    first = t.ask("the cat")
    assert first == chatty.answer("the cat")
    second = t.ask("it's (1, 2) = ${x}")
    assert second == chatty.answer("the cat", first, "it's (1, 2) = ${x}")
    assert "/system TEXT" in t.ask("/help")
    assert "there is no such command" in t.ask("/rest")
    t.type("/system be short\r/reset\r")
    t.until("/reset\r\n> ")
    assert t.ask(" /a cat") == chatty.answer(" /a cat", system="be short")
    error = t.ask("q" * 600)
    assert "error: the message with the system turn makes a prompt of 6" in error and "at most 488" in error
    again = t.ask("the cat")
    assert again == chatty.answer(" /a cat", chatty.answer(" /a cat", system="be short"), "the cat", system="be short")
    assert t.leave() == 0


@pytest.mark.parametrize("how", ["bracketed", "bare", "no readline"])
def test_a_paste_of_many_lines_is_one_message(endless: Model, terminal: Callable[..., Terminal], how: str) -> None:
    t = terminal(endless.run, readline=how != "no readline")
    text = "the cat\n\nsat on it\n  and was"
    if how == "bracketed":
        t.type("\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~")
        t.until("and was")
        t.type("\r")
    else:
        t.type(text.replace("\n", "\r"))
        t.until("and was\r\n")
    answer = t.until("\r\n> ").removeprefix("\n").split("\n")[-1]
    assert answer == endless.answer(text)
    assert t.ask("so") == endless.answer(text, answer, "so")
    assert t.leave("\x04") == 0


def test_ctrl_c_stops_the_answer_and_then_the_program(endless: Model, terminal: Callable[..., Terminal]) -> None:
    t = terminal(endless.run, "tokens=15000")
    t.type("the cat\r")
    t.until("the cat\r\n")
    t.read(lambda seen: len(seen) >= 20)  # it is shown while it comes
    t.type("\x03")
    partial = t.until("\n(stopped)\r\n> ").replace("^C", "").removesuffix("\r")
    assert 20 <= len(partial) < 15_000
    t.type("and\r")
    t.until("and\r\n")
    t.read(lambda seen: len(seen) >= 20)
    assert t.seen[:10] == endless.answer("the cat", partial, "and", tokens=10)
    t.type("\x03")
    t.until("(stopped)\r\n> ")
    t.interrupt("half a line")
    assert t.leave("\x03") == 130


def test_ctrl_c_between_two_lines_is_not_remembered(chatty: Model, terminal: Callable[..., Terminal]) -> None:
    t = terminal(chatty.run)
    for _ in range(2):
        t.interrupt()
        t.ask("/help")
    assert t.leave() == 0
