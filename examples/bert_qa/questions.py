"""Questions whose answer stands in a text: SQuAD, or what Python itself says of its functions."""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
import urllib.request
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SQUAD = "https://rajpurkar.github.io/SQuAD-explorer/dataset/{}-v1.1.json"
LIMIT_S = 60
ENTRIES = 3  # functions that a text about Python tells of
HELD_OUT = 10  # one of so many functions is only asked about at the end
MODULES = (
    "argparse array ast asyncio base64 bisect builtins calendar cmath codecs collections configparser "
    "contextlib copy csv datetime decimal difflib email.message enum fileinput fractions functools "
    "glob graphlib gzip hashlib heapq html http.client http.cookies inspect io ipaddress itertools "
    "json linecache locale logging mailbox math mimetypes mmap operator os os.path pathlib pickle "
    "pickletools platform plistlib pprint queue random re sched secrets selectors shelve shlex shutil "
    "signal smtplib socket sqlite3 ssl statistics string struct subprocess sysconfig tarfile tempfile "
    "textwrap threading timeit tokenize trace traceback types typing unicodedata unittest "
    "urllib.parse urllib.request uuid warnings wave weakref xml.dom.minidom xml.etree.ElementTree "
    "zipfile zlib "
)


@dataclass(frozen=True)
class Question:
    """A question about a text, and the answers that count as right; the first begins at `start`."""

    id: str
    text: str
    context: str
    answers: tuple[str, ...]
    start: int


def read_questions(dataset: str, folder: Path) -> tuple[list[Question], list[Question]]:
    """Questions to train with, and others to be asked at the end.

    Args:
        dataset: "pydoc"; "squad", which is fetched into `folder`; or the path of a folder that holds files of
            SQuAD's form, train-v1.1.json and dev-v1.1.json.
        folder: where what is fetched is kept.
    """
    if dataset == "pydoc":
        return pydoc()
    if dataset == "squad":
        return read_squad(fetch("train", folder)), read_squad(fetch("dev", folder))
    return read_squad(Path(dataset, "train-v1.1.json")), read_squad(Path(dataset, "dev-v1.1.json"))


# -- SQuAD -----------------------------------------------------------------------------------------------


def fetch(split: str, folder: Path) -> Path:
    """The file of one half of SQuAD, fetched if it is not there; a half fetched one has another name."""
    path = folder / f"{split}-v1.1.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(SQUAD.format(split), timeout=LIMIT_S) as answer:
            part = path.with_suffix(".part")
            part.write_bytes(answer.read())
        part.replace(path)
    return path


def read_squad(path: Path) -> list[Question]:
    """The questions in a file of SQuAD 1.1, in its order."""
    found = []
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for one in paragraph["qas"]:
                answers = tuple(answer["text"] for answer in one["answers"])
                start = one["answers"][0]["answer_start"]
                found.append(Question(one["id"], one["question"], paragraph["context"], answers, start))
    return found


# -- Python's documentation ------------------------------------------------------------------------------


def pydoc() -> tuple[list[Question], list[Question]]:
    """What does a function do? The text tells it of several; the answer is a sentence of it.

    Functions that are asked about at the end are in no text before.
    """
    told = dict(sentences())
    held_out = {name for name in told if zlib.crc32(name.encode()) % HELD_OUT == 0}
    train = {name: told[name] for name in sorted(told.keys() - held_out)}
    final = {name: told[name] for name in sorted(held_out)}
    return list(_ask(train, rounds=2, seed=1)), list(_ask(final, rounds=1, seed=2))


def sentences() -> Iterator[tuple[str, str]]:
    """Name and first sentence of documentation of what the modules define, in no order."""
    for module_name in MODULES.split():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module(module_name)
        for name, thing in vars(module).items():
            if name.startswith("_"):
                continue
            prefix = "" if module_name == "builtins" else f"{module_name}."
            yield from _sentence(prefix + name, thing)
            if inspect.isclass(thing):
                for member, inner in vars(thing).items():
                    if not member.startswith("_"):
                        yield from _sentence(f"{name}.{member}", inner)


def _sentence(name: str, thing: object) -> Iterator[tuple[str, str]]:
    doc = getattr(thing, "__doc__", None)
    if not callable(thing) or not isinstance(doc, str):
        return
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        found = re.match(r"[A-Z][^.]{15,90}\.(?=\s|$)", " ".join(paragraph.split()))
        if found:
            yield name, found[0]
            return


def _ask(told: dict[str, str], *, rounds: int, seed: int) -> Iterator[Question]:
    """A question for each function and round; in each round it stands beside others."""
    for number in range(rounds):
        names = list(told)
        random.Random(seed * 1000 + number).shuffle(names)
        for first in range(0, len(names), ENTRIES):
            beside = names[first : first + ENTRIES]
            context = " ".join(f"{name}: {told[name]}" for name in beside)
            at = 0
            for name in beside:
                start = at + len(name) + 2
                at = start + len(told[name]) + 1
                yield Question(f"{name}-{number}", f"What does {name} do?", context, (told[name],), start)
