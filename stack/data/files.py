"""Files of text: which ones a person means, what each holds, and whether it holds that still.

A packed folder and a tokenizer are named by the digests of the files that they are made of, so what is read must be
what was digested: :class:`File` remembers what it was then, and every reader holds what it reads against that.
"""

from __future__ import annotations

import glob
import os
import stat
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stack.core.errors import UserError
from stack.core.files import sha256

JSON_LINES = (".jsonl", ".ndjson", ".json")  # .json may be one array, too
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
CHUNK = 1 << 20  # bytes
_READ = f"read are {', '.join((*JSON_LINES, '.txt'))} (also behind these: {', '.join(COMPRESSED)}) and .parquet"


def kind(path: Path) -> tuple[str, str]:
    """How a file is read: ``.jsonl``, ``.ndjson``, ``.json``, ``.txt`` or ``.parquet``, and its compression or nothing.

    Capitals are small letters here. UserError for what is not read.
    """
    outer = path.suffix.lower()
    inner = Path(path.stem).suffix.lower() if outer in COMPRESSED else outer
    if inner in (*JSON_LINES, ".txt") or outer == ".parquet":
        return inner, outer if outer in COMPRESSED else ""
    raise UserError(f"{shown(path)}: text is not read from {outer or 'a file without suffix'}; {_READ}")


def shown(path: Path | str) -> str:
    """A path for messages and manifests; a byte of its name that is no UTF-8 is written as ``\\xe9``."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


# ---------------------------------------------------------------- what a file held


class Changed(UserError):
    """A file holds something else than it did when its digest was taken."""


@dataclass
class File:
    """A file at the moment of its snapshot."""

    path: Path
    size: int  # bytes
    sha256: str | None  # None where nobody asked for it
    _state: tuple[int, ...]

    def identity(self) -> dict[str, object]:
        """Name, size and digest; not its folder, so that a corpus may be moved."""
        return {"name": shown(self.path.name), "bytes": self.size, "sha256": self.sha256}

    @property
    def content(self) -> str:
        """The same for the same content: its digest, or without that what changes with it."""
        return self.sha256 or repr(self._state)

    def check(self) -> None:
        """Raise :class:`Changed` where it is another one now; costs a look at the folder as long as it is not."""
        state = _state(self.path)
        if state == self._state:
            return
        if self.sha256 is None:
            if state[:-1] != self._state[:-1]:  # the last is moved by a new link or mode, too
                raise Changed(f"{shown(self.path)} changed while it was read (now {state[2]:,} bytes, {_WAY_OUT}")
        else:
            self.hold(*_digest(self.path))
        self._state = state  # a new time or place of the same content

    def hold(self, size: int, sha256: str) -> None:
        """Raise :class:`Changed` unless this is what the file held."""
        if (size, sha256) != (self.size, self.sha256):
            raise Changed(
                f"{shown(self.path)} changed while it was read: its digest was taken of {self.size:,} bytes, SHA-256 "
                f"{self.sha256}, and then it had {size:,}, SHA-256 {sha256} (nothing made from it was kept; {_WAY_OUT}"
            )


_WAY_OUT = "start again when nobody writes to it, or copy it and give the copy)"


def snapshot(path: Path, *, digest: bool = True) -> File:
    """The file as it is, with its SHA-256 if that is wanted; UserError where it cannot be read, or only once."""
    state = _state(path)
    size, sha256 = _digest(path) if digest else (state[2], None)
    found = File(path, size, sha256, state)
    found.check()
    return found


def _state(path: Path) -> tuple[int, ...]:
    """What differs after a change: device, inode, size, time of change of the content, and of anything.

    UserError where there is nothing, or what can be read only once.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        nowhere = isinstance(error, FileNotFoundError) and os.path.islink(path)
        why = f"is a link to {shown(os.readlink(path))}, which is not there" if nowhere else _cause(error)
        raise UserError(f"{shown(path)} {why}") from error
    if not stat.S_ISREG(found.st_mode):
        raise UserError(
            f"{shown(path)} is a pipe or a device, and text is read more than once (for its digest, for the tokenizer, "
            "for packing); write it to a file and give that"
        )
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _cause(error: OSError) -> str:
    return f"cannot be read: {error.strerror}"


def _digest(path: Path) -> tuple[int, str]:
    """Bytes and SHA-256 of a file."""
    try:
        return path.stat().st_size, sha256(path)
    except OSError as error:
        raise UserError(f"{shown(path)} {_cause(error)}") from error


# ---------------------------------------------------------------- which files are meant


@dataclass
class Found:
    """The files that names, patterns and folders stand for."""

    files: list[Path] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)  # given as such
    passed_over: Counter[str] = field(default_factory=Counter)  # files below them that are not read, by suffix
    again: int = 0  # names left out because they lead to a file or a folder that is there already

    def said(self) -> str | None:
        """What a person should know of it, one line; None where every name is one file."""
        parts = []
        if self.folders:
            kinds = Counter("".join(kind(path)) for path in self.files)
            files = "file" if len(self.files) == 1 else "files"
            parts.append(f"{len(self.files):,} {files} ({_counted(kinds)})")
        if self.passed_over:
            folders = ", ".join(f"{shown(folder)}/" for folder in self.folders)
            parts.append(f"not read below {folders}: {_counted(self.passed_over)}")
        if self.again:
            names = "name leads" if self.again == 1 else "names lead"
            parts.append(f"{self.again:,} {names} to a file or folder that is there already and counts once")
        return "; ".join(parts) or None


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(names.items()))


def find(patterns: Iterable[str], group: str = "data") -> Found:
    """The files that names, glob patterns and folders stand for, in their order, those of one sorted.

    A folder stands for all that is read below it. Each file comes once, whatever its names and the links to it are.
    What exists is taken as it is, whatever characters are in its name. UserError for a name or pattern without a file,
    and for a file that is not read; ``group`` is the configuration group whose flags it names.
    """
    found = Found()
    taken: set[object] = set()
    for pattern in patterns:
        best: dict[object, Path] = {}
        for path in _paths(pattern, group, found):
            one = identity(path)
            found.again += one in best or one in taken
            if one not in taken:
                best[one] = min(best.get(one, path), path, key=lambda path: (len(path.parts), str(path)))
        found.files += sorted(best.values(), key=str)
        taken.update(best)
    return found


def identity(path: Path) -> object:
    """The same for two names of one file, by links of either kind."""
    device, inode, size, changed, _ = _state(path)
    # Some network file systems number no files, or number two alike.
    return (device, inode, size, changed) if inode else os.path.realpath(path)


def _paths(pattern: str, group: str, found: Found) -> Iterator[Path]:
    """The files of one name, pattern or folder; ``found`` counts what is passed over or leads to a folder again."""
    for path in _named(pattern, group, found):
        if os.path.isdir(path):
            yield from _below(path, group, found)
        else:
            _state(path)  # a pipe is told before its want of a suffix
            kind(path)
            yield path


def _below(top: Path, group: str, found: Found) -> Iterator[Path]:
    """The files below a folder that are read; UserError where there is none."""
    found.folders.append(top)
    some = False
    for folder, names in _folders(top, found):
        for path in (folder / name for name in names):
            try:
                kind(path)
            except UserError:
                found.passed_over[path.suffix.lower() or "without suffix"] += 1
                continue
            some = True
            yield path
    if not some:
        passed = f" (there are {_counted(found.passed_over)})" if found.passed_over else ""
        raise UserError(f"{shown(top)}: no file below this folder is one that text is read from{passed}; {_READ}")


def _named(pattern: str, group: str, found: Found) -> list[Path]:
    """What bears a name or matches a pattern."""
    for path in (pattern, os.path.expanduser(pattern)):
        if path and os.path.lexists(path):
            return [Path(path)]
    names = sorted({str(path) for path in _matches(Path(path), found)}) if pattern and "\0" not in pattern else []
    if not names:
        why = f"there is no such file (looked in {Path.cwd()}"
        why += "; what is elsewhere is fetched first)" if "://" in pattern else ")"
        try:
            os.lstat(path)
        except PermissionError as error:
            why = _cause(error)
        except (OSError, ValueError):
            pass
        raise UserError(f"{shown(pattern) or 'an empty name'}: {why}; change {group}.files")
    return [Path(name) for name in names]


def _matches(pattern: Path, found: Found) -> Iterator[Path]:
    """What matches a pattern, in which ``**`` stands for any folders, links to folders followed, each once."""
    if "**" not in pattern.parts:
        yield from map(Path, glob.glob(str(pattern)))
        return
    at = pattern.parts.index("**")
    above, below = Path(*pattern.parts[:at]), pattern.parts[at + 1 :]
    for top in sorted(glob.glob(str(above))) if at else ["."]:
        for folder, names in _folders(Path(top), found):
            if below:
                yield from _matches(Path(glob.escape(str(folder)), *below), found)
            else:
                yield from (folder / name for name in names)


def _folders(top: Path, found: Found) -> Iterator[tuple[Path, list[str]]]:
    """Every folder from ``top`` down with the names of its files, none of them hidden; nearest first, each once."""
    seen: set[tuple[int, int]] = set()
    waiting = deque([top] if os.path.isdir(top) else [])
    while waiting:
        folder = waiting.popleft()
        try:
            about = os.stat(folder)
            if (about.st_dev, about.st_ino) in seen:
                found.again += 1
                continue
            seen.add((about.st_dev, about.st_ino))
            with os.scandir(folder) as inside:
                entries = sorted((e.name, e.is_dir()) for e in inside if not e.name.startswith("."))
        except OSError as error:
            raise UserError(f"{shown(folder)} {_cause(error)}") from error
        waiting += [folder / name for name, is_folder in entries if is_folder]
        yield folder, [name for name, is_folder in entries if not is_folder]


def hold(seen: Iterable[File]) -> None:
    """Raise where a file changed: that comes before anything that is wrong with a mixture of before and after."""
    for file in seen:
        file.check()
