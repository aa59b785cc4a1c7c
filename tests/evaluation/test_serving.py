"""A saved folder in the hands of others: batches, a pipeline and a server of transformers answer as stack.chat does."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import talker
import tiny
import torch
from talker import TOKENS, one_shot
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.utils import logging as their_logging

from stack.checkpoint.open import load_base

QUESTIONS = ("the cat", "a", "what is the answer to the cat that sat", "you there")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model's checkpoint."""
    return load_base(str(talker.save(tmp_path_factory.mktemp("served"))), "runs").folder


def answer(folder: Path, text: str) -> str:
    return one_shot(f"checkpoint={folder}", f"prompt={text}")[1].removesuffix("\n")


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("chat", [True, False])
def test_a_batch_of_unequal_prompts_is_answered_as_each_alone(
    tmp_path: Path, chat: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = load_base(str(talker.save(tmp_path, chat=chat)), "runs").folder
    words, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    texts = list(QUESTIONS)
    if chat:
        texts = [words.apply_chat_template(asked(text), add_generation_prompt=True, tokenize=False) for text in texts]
    ids = [words(text, add_special_tokens=not chat).input_ids for text in texts]
    assert len(set(map(len, ids))) == len(ids)
    alone = [
        model.generate(torch.tensor([row]), attention_mask=torch.ones(1, len(row)), max_new_tokens=TOKENS)[
            0, len(row) :
        ]
        for row in ids
    ]
    batch = words.pad({"input_ids": ids}, return_tensors="pt")
    their_logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        together = model.generate(**batch, max_new_tokens=TOKENS)[:, batch.input_ids.shape[1] :]
    their_logging.disable_propagation()
    assert not [record for record in caplog.records if "padding" in record.getMessage()]
    shown = [[words.decode(row, skip_special_tokens=True) for row in rows] for rows in (alone, together)]
    assert shown[0] == shown[1] == [answer(folder, text) for text in QUESTIONS]


def test_a_pipeline_answers_as_stack_chat_does(folder: Path) -> None:
    pipe = pipeline("text-generation", model=str(folder), device="cpu")
    made = pipe([asked(text) for text in QUESTIONS], max_new_tokens=TOKENS, batch_size=2)
    assert [row[0]["generated_text"][-1]["content"] for row in made] == [answer(folder, text) for text in QUESTIONS]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """``transformers serve`` on a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("transformers"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    alone = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--device", "cpu"], env=alone, stdout=log, stderr=log)
    try:
        where = f"http://127.0.0.1:{port}"
        tiny.until(lambda: process.poll() is not None or healthy(where))
        assert process.poll() is None, (tmp_path / "log").read_text()
        yield where
    finally:
        process.kill()
        process.wait()


def healthy(where: str) -> bool:
    try:
        return urllib.request.urlopen(f"{where}/health", timeout=5).status == 200
    except urllib.error.URLError:
        return False


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def test_a_server_answers_as_stack_chat_does(folder: Path, server: str) -> None:
    for text in QUESTIONS[:2]:
        body = {"model": str(folder), "messages": asked(text), "max_tokens": TOKENS}
        (choice,) = post(f"{server}/v1/chat/completions", body)["choices"]
        assert choice["message"]["content"] == answer(folder, text)
