"""Ask a fine-tuned run what it has never seen, from its saved folder, and judge the answers.

    python scripts/check_chat.py runs/laptop-sft

takes the newest checkpoint of the run, answers the held-out conversations of every source that is checked (greedy, at
most ``EACH`` of a source) and prints, by task, the share of exact answers beside that of always giving the most
frequent answer and that of the base before fine-tuning; and of the recipes how many are in form and end by themselves,
how many differ, and how often a dish's words stand in its own answer and in that of another dish. Beside it: what
growth left as it was, and whether ``transformers`` gives the same answers to the run's samples. The result is kept in
``runs/NAME/answers.json``; a second call for the same checkpoint prints it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from stack import checkpoint
from stack.checkpoint.open import Base, build, load_base
from stack.config.checks import typed
from stack.config.schema import FineTune
from stack.core.errors import UserError
from stack.core.machine import choose_device
from stack.evaluation import answers
from stack.evaluation.answers import Answer, Question
from stack.evaluation.generate import generate
from stack.model.embedding import INPUT
from stack.model.huggingface import WEIGHTS
from stack.text import conversation
from stack.training import run_folder

# At most so many held-out conversations of a source; EACH=10 python scripts/check_chat.py … is a quick look.
EACH = int(os.environ.get("EACH", "1020"))
SHOWN = 4


def main(run: Path) -> int:
    """Prints the table; returns 0, or 2 if there is nothing to ask."""
    saved = run_folder.read_config(run)
    folder = checkpoint.newest(run / "checkpoints", print, owner=False)
    if saved is None or folder is None:
        raise UserError(f"{run}: there is no finished checkpoint to ask; fine-tune first: python -m stack.sft")
    config = typed({key: value for key, value in saved.items() if key != "resolved"}, FineTune)
    manifest = checkpoint.read_manifest(folder)
    key = manifest.files[WEIGHTS].sha256
    kept = run / "answers.json"
    if not kept.exists() or json.loads(kept.read_bytes())["model"] != key:
        tuned = load_base(str(folder), config.runs_dir)
        result = ask(config, tuned, manifest.identity["base"])
        result |= {"growth": grown(run, manifest.identity), "transformers": like_transformers(tuned, config)}
        kept.write_text(json.dumps(result | {"model": key}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    report(json.loads(kept.read_bytes()), folder)
    return 0


def ask(config: FineTune, tuned: Base, base: str) -> dict[str, Any]:
    """All questions to the tuned model, and those with one right answer to the base, too."""
    sources = {n: s for n, s in config.chat.resolved_sources().items() if s.check != "none" or s.headings}
    asked = [
        q for q in answers.questions(config.chat, tuned.tokenizer, EACH, tuned.model.context) if q.source in sources
    ]
    print(f"asking {tuned.folder}: {len(asked):,} held-out turns", flush=True)
    device = choose_device(config.device)
    made = answers.answer(build(tuned).to(device), tuned.tokenizer, asked, config.sft.answer_tokens)
    table = answers.judge(made, sources)
    exact = [q for q in asked if sources[q.source].check == "exact"]
    before = continued(load_base(base, config.runs_dir), exact, device)
    untuned = answers.judge(before, sources)
    for name, row in table.items():
        own = [a for a in made if a.question.source == name]
        row["conversations"] = len({a.question.conversation for a in own})
        if "exact" in row:
            row |= {"majority": majority(own), "base": untuned[name]["exact"]}
        if "form" in row:
            row |= of_recipes(own)
    shown = [(a.question.text, a.text) for a in _one_of_each(made)]
    return {"tasks": table, "shown": shown}


def grown(run: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """What growth did, and whether every old row and moment is bit-equal in the run's step 0, where that is left."""
    facts = {key: identity["growth"][key] for key in ("old_rows", "new_rows", "counts", "kl", "bound", "mass")}
    step_0, base = run / "checkpoints/step-00000000", Path(identity["base"])
    if not step_0.is_dir() or not (base / checkpoint.MANIFEST).is_file():
        return facts
    (old, new), table = (checkpoint.load(folder) for folder in (base, step_0)), INPUT
    kept = [i for part in identity["growth"]["kept"] for i in range(part["old"][0], part["old"][1] + 1)]
    pairs = [(old.weights, new.weights), *([(old.moments, new.moments)] if new.moments else [])]

    def kept_of(key: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[kept] if key.endswith(table) and tensor.dim() else tensor

    equal = all(torch.equal(kept_of(key, a[key]), kept_of(key, b[key])) for a, b in pairs for key in a)
    return facts | {"old rows and moments bit-equal": equal}


def like_transformers(tuned: Base, config: FineTune) -> dict[str, Any]:
    """Greedy answers of 64 tokens to the run's samples, by this program and by transformers from the same folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words, own = tuned.tokenizer, build(tuned)
    theirs, template = (kind.from_pretrained(tuned.folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    equal = 0
    for prompt in config.sample.prompts:
        messages = [{"role": "user", "content": prompt}]
        ids, _ = conversation.encode(words, messages, generation_prompt=True)
        answer = generate(own, [ids], tokens=64, stops=words.stops, banned=words.unsampled)[0]
        inputs = template.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        reference = theirs.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        equal += answer == reference.tolist() and inputs["input_ids"][0].tolist() == ids
    head, table = theirs.get_output_embeddings().weight, theirs.get_input_embeddings().weight
    return {
        "equal": equal,
        "prompts": len(config.sample.prompts),
        "parameters": sum(p.numel() for p in theirs.parameters()),
        "one_table": head is table,
        "stops": theirs.generation_config.eos_token_id,
    }


def continued(base: Base, asked: list[Question], device: str) -> list[Answer]:
    """What the base writes in the line after each question; it knows no turns."""
    words = base.tokenizer
    prompts = [[words.end_of_text, *words.encode(f"{q.text}\n")] for q in asked]
    model, made = build(base).to(device), []
    for start in range(0, len(prompts), answers.BATCH):
        some = prompts[start : start + answers.BATCH]
        made += generate(model, some, tokens=16, stops=words.stops, banned=words.unsampled)
    lines = [words.decode(ids).strip().split("\n")[0].strip() for ids in made]
    return [Answer(q, line, True) for q, line in zip(asked, lines, strict=True)]


def majority(own: list[Answer]) -> float:
    """The share that always giving the most frequent answer would get right."""
    references: dict[int, tuple[str, ...]] = {}
    for a in own:
        number = a.question.conversation
        references[number] = (*references.get(number, ()), a.question.reference)
    return Counter(references.values()).most_common(1)[0][1] / len(references)


def of_recipes(own: list[Answer]) -> dict[str, float]:
    """How many answers differ, and the share of a dish's words in its own answer and in the next dish's."""
    dishes = [set(re.findall(r"[a-z]{4,}", a.question.text.lower())) - {"make"} for a in own]
    texts = [a.text.lower() for a in own]
    bodies = [text.partition("\n")[2] for text in texts]  # below the title

    def share(of: list[str]) -> float:
        return sum(word in text for dish, text in zip(dishes, of, strict=True) for word in dish) / sum(map(len, dishes))

    return {
        "distinct": len(set(texts)) / len(texts),
        "words_own": share(texts),
        "words_other": share(texts[1:] + texts[:1]),
        "words_own_below_title": share(bodies),
        "words_other_below_title": share(bodies[1:] + bodies[:1]),
    }


def _one_of_each(made: list[Answer]) -> list[Answer]:
    """The first answer of each of a few sources, in form ones first."""
    firsts = {a.question.source: a for a in reversed(made)}
    order = ("recipes", "add", "sort", "weekday")
    return [firsts[name] for name in (*order, *firsts) if name in firsts][:SHOWN]


def report(result: dict[str, Any], folder: Path) -> None:
    """The table, the recipes, a few answers."""
    print(f"\nheld-out conversations, answered by {folder}")
    print(f"  {'task':<10}{'asked':>7}{'stopped':>9}{'exact':>8}{'majority':>10}{'base':>8}")
    for name, row in result["tasks"].items():
        line = f"  {name:<10}{row['conversations']:>7,}{row['stopped']:>9.1%}"
        if "exact" in row:
            line += f"{row['exact']:>8.1%}{row['majority']:>10.1%}{row['base']:>8.1%}"
        print(line)
    for name, row in result["tasks"].items():
        if "form" in row:
            print(
                f"\n{name}: {row['form']:.1%} with every heading and a stop, {row['distinct']:.1%} distinct; "
                f"a dish's words in its own answer {row['words_own']:.1%}, in another's {row['words_other']:.1%} "
                f"(below the title {row['words_own_below_title']:.1%} and {row['words_other_below_title']:.1%})"
            )
    g, t = result["growth"], result["transformers"]
    print(
        f"\ngrowth: {g['old_rows']:,} → {g['new_rows']:,} rows, {g['counts']['initialized']} initialized; "
        f"KL {g['kl']:.6f} nats, at most {g['bound']:.6f}; mass on the new rows {g['mass']:.6f}; "
        f"old rows and moments bit-equal: {g.get('old rows and moments bit-equal', 'step 0 is gone')}"
    )
    print(
        f"transformers: {t['parameters']:,} parameters, head and table are one: {t['one_table']}, stops {t['stops']}; "
        f"{t['equal']} of {t['prompts']} greedy answers of 64 tokens are equal"
    )
    print("\nfour answers")
    for question, answer in result["shown"]:
        print(f"  > {question}")
        print("".join(f"    {line}\n" for line in answer.splitlines()), end="")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/check_chat.py runs/NAME")
    try:
        began = time.monotonic()
        code = main(Path(sys.argv[1]))
        print(f"({time.monotonic() - began:.0f} s)")
        sys.exit(code)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
