"""Draws the pictures of the pages under docs/concepts: boxes and arrows, 440 pixels wide for phones.

`python docs/pictures/concepts.py` writes them. With --check it changes nothing, and the exit status is 1
if one of the files is not what it draws.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "benchmarks"))

from drawing import Diagram  # noqa: E402  # pyright: ignore[reportMissingImports]

WIDTH, MIDDLE = 440, 220


def main() -> int:
    """Write the pictures, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the files with the drawings")
    options = parser.parse_args()
    found = {HERE / name: draw().svg() for name, draw in PICTURES.items()}
    if options.check:
        return int(any(not path.exists() or path.read_text() != picture for path, picture in found.items()))
    for path, picture in found.items():
        path.write_text(picture)
    return 0


def draw_tiers() -> Diagram:
    """Return the picture of the two processes of a rank and the three tiers of its checkpoints."""
    drawing = Diagram(WIDTH, 432, "Two processes and three tiers")
    drawing.frame(12, 12, 416, 282, "a machine: two processes per rank")
    drawing.box(28, 42, 170, 62, "trainer", "your script,", "with torch", kind="accent")
    drawing.box(242, 42, 170, 62, "keeper", "hashes, writes,", "watches; no torch", kind="accent")
    drawing.arrow((113, 104), (113, 152))
    drawing.text(121, 132, "copies")
    drawing.arrow((262, 152), (262, 104))
    drawing.text(270, 132, "reads")
    drawing.arrow((350, 104), (350, 228))
    drawing.text(358, 132, "writes")
    drawing.box(28, 152, 282, 48, "1 memory: copies of the state", "outlive a killed trainer")
    drawing.box(28, 228, 384, 48, "2 local folder, if you give one", "outlives a restart of the machine")
    drawing.arrow((MIDDLE, 276), (MIDDLE, 332))
    drawing.text(MIDDLE + 8, 317, "in the background")
    drawing.box(28, 332, 384, 48, "3 home: a shared disk or a bucket", "outlives the machine")
    drawing.text(MIDDLE, 403, "The next start reads each byte from the", "soft", anchor="middle")
    drawing.text(MIDDLE, 420, "nearest tier that has it undamaged.", "soft", anchor="middle")
    return drawing


def draw_save() -> Diagram:
    """Return the picture of the life of a save, over time from left to right."""
    drawing = Diagram(WIDTH, 394, "The life of a save, from left to right")
    staged, durable, in_home = 160, 334, 424
    for x in (staged, durable, in_home):
        drawing.line(x, 30, x, 290, "mark")
    drawing.text(staged, 22, "staged", "title", anchor="middle")
    drawing.text(durable, 22, "durable", "title", anchor="middle")
    drawing.text(in_home + 8, 22, "in home", "title", anchor="end")
    drawing.text(16, 46, "training", "soft")
    drawing.box(16, 54, 56, 36, "step")
    drawing.box(72, 54, 14, 36, kind="harm")
    drawing.box(86, 54, 150, 36, "forward, backward")
    drawing.box(236, 54, 56, 36, "step")
    drawing.box(292, 54, 132, 36, "and so on")
    drawing.text(79, 106, "save()", "bad", anchor="middle")
    drawing.text(16, 130, "copying thread", "soft")
    drawing.box(86, 138, staged - 86, 36, "copies", kind="accent")
    drawing.text(16, 198, "keeper", "soft")
    drawing.box(staged, 206, 64, 44, "writes,", "hashes", kind="accent")
    drawing.box(staged + 64, 206, 42, 44, "part", kind="accent")
    drawing.box(staged + 106, 206, durable - staged - 106, 44, "manifest", kind="accent")
    drawing.box(durable, 206, in_home - durable, 44, "copies", "to home", kind="accent")
    drawing.text(16, 282, "time", "soft")
    drawing.arrow((56, 278), (in_home, 278))
    drawing.text(16, 318, "The trainer is killed: the next start has", "soft")
    drawing.box(16, 330, staged - 16, 46, "the save before")
    drawing.box(staged, 330, in_home - staged, 46, "this save", kind="fine")
    return drawing


def draw_restore() -> Diagram:
    """Return the picture of a restore: candidates, five stages, and the ways out of them."""
    drawing = Diagram(WIDTH, 510, "The life of a restore")
    drawing.box(16, 16, 408, 48, "newest checkpoint", "greatest attempt, then greatest step")
    stages = [
        (94, "open", "the manifest and its seal"),
        (166, "check", "every file, with its size"),
        (238, "plan", "which bytes fill which tensor"),
        (332, "read", "chunk by chunk: hash, then fill"),
        (404, "finish", "values, generators, loaders"),
    ]
    above = 64
    for y, name, text in stages:
        drawing.arrow((44, above), (44, y))
        drawing.box(16, y, 288, 48, name, text, kind="box" if y < 300 else "accent")
        above = y + 48
        if name != "finish":
            drawing.curve([(304, y + 24), (344, y + 24)], "wire")
    drawing.line(16, 309, 304, 309, "mark")
    drawing.text(56, 303, "nothing live has changed yet", "soft")
    drawing.arrow((344, 356), (344, 64))
    for number, line in enumerate(("damage", "on any", "rank: the", "next", "older")):
        drawing.text(354, 134 + 17 * number, line, "bad")
    for number, line in enumerate(("no answer:", "again, at", "last an", "error")):
        drawing.text(354, 258 + 17 * number, line)
    drawing.text(MIDDLE, 479, "All ranks send their outcome after each", "soft", anchor="middle")
    drawing.text(MIDDLE, 496, "stage, and begin the next one together.", "soft", anchor="middle")
    return drawing


def draw_ranks() -> Diagram:
    """Return the picture of an agreement between two ranks, and of a commit without messages."""
    drawing = Diagram(WIDTH, 486, "Agreement between ranks")
    drawing.text(16, 26, "During training: flags after each step", "title")
    for y, rank in ((44, 0), (156, 1)):
        drawing.text(16, y + 23, f"rank {rank}", "soft")
        for number, text in enumerate(("step 41", "step 42", "save 42")):
            drawing.box(80 + 115 * number, y, 111, 36, text, kind="fine" if number == 2 else "box")
    drawing.box(195, 100, 111, 36, "all-reduce", kind="accent")
    for start, end in (((191, 80), (203, 100)), ((191, 156), (203, 136))):
        drawing.arrow(start, end)
    for start, end in (((298, 100), (310, 80)), ((298, 136), (310, 156))):
        drawing.arrow(start, end)
    drawing.arrow((112, 222), (112, 192))
    drawing.text(80, 238, "SIGTERM on rank 1: both save step 42", "bad")
    drawing.line(16, 256, 424, 256, "grid")
    drawing.text(16, 282, "During a save: files, and no messages", "title")
    drawing.box(16, 298, 132, 44, "keeper", "of rank 0", kind="accent")
    drawing.box(292, 298, 132, 44, "keeper", "of rank 1", kind="accent")
    drawing.frame(16, 382, 408, 88, "home")
    drawing.box(32, 410, 100, 44, "part", "of rank 0")
    drawing.box(170, 410, 100, 44, "manifest", "last", kind="fine")
    drawing.box(308, 410, 100, 44, "part", "of rank 1")
    drawing.arrow((82, 342), (82, 410))
    drawing.arrow((358, 342), (358, 410))
    drawing.arrow((130, 342), (204, 410))
    drawing.text(166, 356, "once both", "soft")
    drawing.text(182, 373, "parts exist", "soft")
    return drawing


def draw_watch() -> Diagram:
    """Return the picture of the two halves of a watch, and of what the core does with their findings."""
    drawing = Diagram(WIDTH, 436, "Watches of a run")
    drawing.frame(12, 12, 416, 134, "a watch, such as Hang or Spike")
    trainer = "in the trainer", "completed steps,", "recorded losses,", "saves"
    keeper = "in the keeper", "time without a step,", "bytes being hashed,", "parts"
    drawing.box(28, 42, 184, 90, *trainer, kind="accent")
    drawing.box(228, 42, 184, 90, *keeper, kind="accent")
    drawing.arrow((110, 132), (110, 184))
    drawing.text(118, 168, "vote")
    drawing.arrow((MIDDLE, 146), (MIDDLE, 340))
    drawing.text(MIDDLE + 8, 168, "report")
    drawing.arrow((328, 132), (328, 184))
    drawing.text(336, 168, "mark")
    drawing.box(16, 184, 190, 66, "all ranks do the", "greatest of SAVE,", "GO_BACK and STOP")
    drawing.box(234, 184, 190, 66, "the manifest says", "healthy, unhealthy", "or unknown")
    drawing.arrow((328, 250), (328, 274))
    drawing.box(234, 274, 190, 46, "retention keeps", "the newest healthy")
    drawing.box(16, 340, 408, 40, "a warning, and a line of the history")
    drawing.text(MIDDLE, 404, "An error in a watch switches that watch off:", "soft", anchor="middle")
    drawing.text(MIDDLE, 421, "training and saves continue.", "soft", anchor="middle")
    return drawing


def draw_trust() -> Diagram:
    """Return the picture of the hashes from the manifest down to the bytes of a tensor."""
    drawing = Diagram(WIDTH, 356, "Trust: from the manifest to a tensor")
    links = ["hash of each part", "hash of each chunk", "if the hash matches"]
    boxes = [
        ("manifest", "seal: a hash of its text", "box"),
        ("part of a rank", "seal: a hash of its text", "box"),
        ("data file: safetensors", "chunks of up to 8 MiB", "box"),
        ("your tensors", "filled in place", "fine"),
    ]
    for number, (name, text, kind) in enumerate(boxes):
        y = 16 + 92 * number
        drawing.box(16, y, 226, 48, name, text, kind=kind)
        if number < len(links):
            drawing.arrow((60, y + 48), (60, y + 92))
            drawing.text(70, y + 75, links[number], "soft")
    refused = "refused", "any damage,", "links in a home,", "documents beyond", "the limits"
    drawing.box(270, 16, 154, 140, *refused, kind="harm")
    drawing.box(270, 200, 154, 140, "not checked", "who wrote it:", "hashes are not", "signatures")
    return drawing


def draw_peers() -> Diagram:
    """Return the picture of two hosts that hold copies of each other's files in memory."""
    drawing = Diagram(WIDTH, 470, "Two hosts that are peers")
    for x, host, rank, other in ((12, "A", 0, 1), (228, "B", 1, 0)):
        drawing.frame(x, 12, 200, 274, f"host {host}")
        drawing.box(x + 12, 42, 82, 44, "trainer", f"rank {rank}", kind="accent")
        drawing.box(x + 106, 42, 82, 44, "keeper", f"rank {rank}", kind="accent")
        drawing.arrow((x + 53, 86), (x + 53, 128))
        drawing.text(x + 61, 111, "copies")
        drawing.box(x + 12, 128, 176, 48, "arena", f"files of rank {rank}")
        drawing.box(x + 12, 222, 176, 48, "copy", f"files of rank {other}", kind="fine")
        drawing.arrow((x + 100, 286), (x + 100, 332))
    drawing.arrow((200, 160), (240, 238))
    drawing.arrow((240, 160), (200, 238))
    drawing.text(28, 204, "sent by the")
    drawing.text(412, 204, "two keepers", anchor="end")
    drawing.text(MIDDLE, 315, "in the background", anchor="middle")
    drawing.box(12, 332, 416, 48, "home: a shared disk or a bucket", "outlives all hosts")
    drawing.text(MIDDLE, 411, "Host B is lost: the memory of host A", "soft", anchor="middle")
    drawing.text(MIDDLE, 428, "has the files of both ranks. The next", "soft", anchor="middle")
    drawing.text(MIDDLE, 445, "start reads them there, and checks them.", "soft", anchor="middle")
    return drawing


PICTURES: dict[str, Callable[[], Diagram]] = {
    "tiers.svg": draw_tiers,
    "save.svg": draw_save,
    "restore.svg": draw_restore,
    "ranks.svg": draw_ranks,
    "peers.svg": draw_peers,
    "watch.svg": draw_watch,
    "trust.svg": draw_trust,
}

if __name__ == "__main__":
    sys.exit(main())
