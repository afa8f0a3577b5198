"""The tree's promises as tests: layers, names, job statements, what is public, what imports torch."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import holdfast
import holdfast.jobs
import slow_tests
from holdfast.errors import Unsupported
from holdfast.system.failpoint import POINTS
from holdfast.system.stubs import read_stub
from programs import run_python

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "holdfast"
FILES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES} - {PACKAGE})

# A room may import only rooms before its own: no later one, no sibling. So may a floor of a room.
# A new folder or top-level file must be placed here, by hand, in review.
ROOMS = "errors | system | checkpoint | watch | train adapters jobs | cli testing"
FLOORS = {
    "adapters": """
        kit | accelerate dcp deepspeed lightning ray recipe torchtitan trackers transformers | nebula
    """,
    "checkpoint": """
        copies format | policy ranks retention state store | home stage | keeper restore
        | exchange watch | run
    """,
    "watch": "* | pace | defaults report",
    "jobs": """
        environment folder journal outcome output status timers writeback
        | node_spec task | state_machine | history
        | records | engine node | machines notifications
        | controller description recorded | registry | interface k8s local sky slurm
        | __main__ dash
    """,
}
# Imports that still point up or sideways. This list only shrinks.
UPWARD = """
"""


def ranks(layers: str) -> dict[str, int]:
    """Return the number of each part's layer; that of `*` is of all parts that are not named."""
    return {part: number for number, layer in enumerate(layers.split("|")) for part in layer.split()}


ROOM_RANKS = ranks(ROOMS)
FLOOR_RANKS = {room: ranks(floors) for room, floors in FLOORS.items()}

# Rooms and files whose `__all__` only the package itself uses. All others are public.
INTERNAL = {
    *("checkpoint.format.manifest", "checkpoint.keeper", "checkpoint.run", "checkpoint.stage"),
    *("checkpoint.state", "watch.compiled"),
}
# Each adapter has one of these, for its framework; `Checkpoint` is Nebula's own name.
ADAPTER_ROLES = {"DataPosition", "Facts", "Folders", "PositionedLoader", "Session", "Settings", "Checkpoint"}
GRAB_BAG = re.compile(r"(^|_)(utils?|helpers?|misc|common|managers?|base|core|tools?|stuff)$")
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file; many tests look at each."""
    return ast.parse(path.read_text())


def part_of(path: Path) -> str:
    """First-level file or folder of the package that `path` belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def dotted(path: Path) -> str:
    """Dotted name of a file, under which it is imported."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name (below the package) of every import from inside the package, lazy ones too."""
    here = ["holdfast", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = here[: len(here) - node.level + 1] if node.level else []
            start = start + (node.module.split(".") if node.module else [])
            found = [[*start, alias.name] for alias in node.names]
        else:
            continue
        yield from ((node.lineno, ".".join(name[1:])) for name in found if name[0] == "holdfast" and name[1:])


def points_down(importer: list[str], imported: list[str]) -> bool:
    """Return whether a file may import another one; both are given by the parts of their dotted name."""
    own, to = importer[0], imported[0]
    if own != to:
        return to not in ROOM_RANKS or ROOM_RANKS[to] < ROOM_RANKS[own]
    floors = FLOOR_RANKS.get(own)
    if not floors or len(importer) < 2 or len(imported) < 2 or importer[1] == imported[1]:
        return True
    if importer[1] == "__init__":  # the door of its room
        return True
    to_floor = floors.get(imported[1], floors.get("*", -1))
    return to_floor < floors.get(importer[1], floors.get("*", 0))


def upward_imports(path: Path) -> list[str]:
    """Imports of `path` that do not point down; [] for the package's own `__init__`, which is the door."""
    own = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if own == ["__init__"]:
        return []
    return [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for _, name in imports(path)
        if not points_down(own, name.split("."))
    ]


def test_every_part_has_a_layer() -> None:
    assert len(FILES) > 20
    assert {part_of(path) for path in FILES} - {"__init__", "__main__"} == set(ROOM_RANKS)
    for room, floors in FLOOR_RANKS.items():
        parts = {path.relative_to(PACKAGE / room).with_suffix("").parts[0] for path in files_of(room)}
        assert "*" in floors or parts - {"__init__"} == set(floors)


def files_of(room: str) -> list[Path]:
    """Return all files of a room, which is named by its path in the package."""
    return [path for path in FILES if PACKAGE / room in path.parents]


def test_imports_point_down() -> None:
    found = [line for path in FILES for line in upward_imports(path)]
    assert sorted(found) == sorted(UPWARD.strip().splitlines())


def test_an_upward_import_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself sees plain, relative, lazy and sibling imports."""
    monkeypatch.setattr("test_house.PACKAGE" if __name__ == "test_house" else f"{__name__}.PACKAGE", tmp_path)
    file = tmp_path / "checkpoint" / "store" / "disk.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import holdfast.checkpoint.keeper\n"
        "from holdfast import cli\n"
        "from ..restore import read\n"
        "from holdfast.checkpoint.format import names\n"
        "def later():\n    from holdfast.checkpoint.run import Checkpointer\n"
    )
    expected = ["checkpoint.keeper", "cli", "checkpoint.restore.read", "checkpoint.run.Checkpointer"]
    assert [line.rpartition(" ")[2] for line in upward_imports(file)] == expected


@each_file
def test_each_file_describes_its_job_in_its_first_line(path: Path) -> None:
    doc = ast.get_docstring(parsed(path))
    assert doc, "no docstring"
    first = doc.splitlines()[0]
    assert len(first) <= 110, "the job takes more than a line"
    assert first.endswith((".", "?")), "the job is not a sentence"


@each_file
def test_a_file_name_does_not_repeat_its_folder(path: Path) -> None:
    stem = path.parent.name if path.stem == "__init__" else path.stem
    own_folder = path.parent.name if path.parent != PACKAGE and path.stem != "__init__" else None
    assert not GRAB_BAG.search(stem), "the name says nothing about the contents"
    assert not stem.startswith(("checkpoint_", "holdfast_")), "repeats the subject of the package"
    assert not (own_folder and re.search(rf"(^|_){own_folder}(_|$)", stem)), "repeats the name of its folder"


@each_file
def test_name_is_not_one_of_the_standard_library(path: Path) -> None:
    taken = sys.stdlib_module_names - {"__main__"}
    assert path.stem not in taken, f"reads like the standard library's {path.stem}"


def public_classes(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Files that define each public class, by its name."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(path)
    return found


def names_with_two_meanings(paths: Iterable[Path]) -> list[str]:
    """Names of classes that differ in their job, and not only in the framework of their adapter."""
    adapters = PACKAGE / "adapters"
    doubled = []
    for name, found in public_classes(paths).items():
        own = [path for path in found if name not in ADAPTER_ROLES or adapters not in path.parents]
        if len(set(own)) > 1 or len({path.parent for path in found}) < len(found):
            doubled.append(f"{name}: {', '.join(str(path.relative_to(PACKAGE)) for path in found)}")
    return doubled


def test_a_class_name_means_one_thing() -> None:
    assert names_with_two_meanings(FILES) == []


def test_a_class_name_with_two_meanings_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    texts = {
        "jobs/a.py": "class Plan: ...\nclass Session: ...\nclass _Own: ...",
        "store/b.py": "class Plan: ...\nclass _Own: ...",
        "adapters/one/c.py": "class Session: ...",
        "adapters/two/c.py": "class Session: ...",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    paths = [tmp_path / name for name in texts]
    assert names_with_two_meanings(paths) == ["Plan: jobs/a.py, store/b.py"]
    assert names_with_two_meanings(paths[2:]) == []


@each_file
def test_no_error_is_swallowed(path: Path) -> None:
    """A handler of everything must do something; one that does nothing must name what it passes over."""
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = ast.unparse(node.type) if node.type else "everything"
        if caught in ("everything", "Exception", "BaseException"):
            assert not all(isinstance(line, (ast.Pass, ast.Continue)) for line in node.body), (
                f"line {node.lineno} swallows {caught}"
            )


@each_file
def test_warnings_point_at_the_users_line(path: Path) -> None:
    """Only `callsite.warn` issues warnings: a `stacklevel` counts frames, which change."""
    calls = [
        node.lineno
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr == "warn" and ast.unparse(node.value) == "warnings"
    ]
    assert not calls, f"lines {calls}: use holdfast.system.callsite.warn"


@pytest.mark.parametrize("package", [holdfast, holdfast.jobs], ids=lambda package: package.__name__)
def test_type_checkers_and_the_interpreter_see_the_same_public_names(package: ModuleType) -> None:
    """Type checkers take a name from a stub only if the import repeats it."""
    stub = Path(str(package.__file__)).with_suffix(".pyi")
    imports = [node for node in ast.walk(parsed(stub)) if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    found = {alias.name: node.module for node in imports for alias in node.names}
    assert found == package._PLACES
    assert package.__all__ == sorted(found)


@pytest.mark.parametrize("name", holdfast.__all__)
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    assert name in dir(holdfast)
    assert getattr(holdfast, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = holdfast.no_such_name  # type: ignore[attr-defined]


STARTS = ("dir(holdfast)", "holdfast.open, holdfast.HoldfastError, holdfast.Keep", "import holdfast.cli")


@pytest.mark.parametrize("start", STARTS)
def test_starting_does_not_import_torch(start: str) -> None:
    code = f"import holdfast; {start}; import sys; print({{'torch', 'numpy', 'rich'}} & set(sys.modules))"
    assert run_python(code) == "set()"


@pytest.mark.parametrize("name", ["Checkpointer", "Save", "replicated", "open"])
def test_a_public_name_does_not_import_dtensors(name: str) -> None:
    """Their package takes longer to import than Holdfast."""
    code = f"import sys, torch, holdfast; holdfast.{name}; print('torch.distributed.tensor' in sys.modules)"
    assert run_python(code) == "False"


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from holdfast.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    assert run_python(code).splitlines()[-1] == "False"


@pytest.mark.parametrize(
    "room", ["checkpoint/format", "checkpoint/store", "checkpoint/keeper", "watch/preemption", "jobs"]
)
def test_room_does_not_import_torch(room: str) -> None:
    """Every file of the room is imported; the keeper's own process must stay small."""
    modules = [dotted(path) for path in files_of(room) if path.stem != "__main__"]
    assert modules
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
    assert run_python(f"{code}print('torch' in sys.modules)") == "False"


def test_every_failpoint_is_passed_somewhere() -> None:
    used = re.findall(r'\bfailpoint\(\s*"([^"]+)"', "\n".join(path.read_text() for path in FILES))
    assert sorted(set(used)) == sorted(POINTS)
    assert len(POINTS) == len(set(POINTS))


def test_every_module_can_be_imported() -> None:
    """No file is left that nothing can load. An adapter may name the package that it needs."""
    for path in FILES:
        if path.stem == "__main__":
            continue
        name = dotted(path)
        try:
            importlib.import_module(name)
        except Unsupported as error:
            assert name.startswith("holdfast.adapters.")
            assert "not installed" in str(error)  # noqa: PT017 - any other error fails the test


def test_each_listed_slow_test_exists() -> None:
    texts: dict[str, str] = {}
    for name in sorted(slow_tests.read()):
        path, *_, function = name.partition("[")[0].split("::")
        text = texts.setdefault(path, (ROOT / path).read_text())
        assert re.search(rf"\b{function}\b", text), f"remove {name} from tests/slow_tests.txt"


@pytest.mark.parametrize("page", ["house.py", "reference.py"])
def test_the_architecture_and_the_reference_are_those_of_today(page: str) -> None:
    command = [sys.executable, str(ROOT / "docs" / page), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_name_of_an_all_has_its_entry_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    entries = re.findall(r"^<!-- api ([\w.]+)", text, re.MULTILINE)
    known = {origin(*f"holdfast.{entry}".rpartition(".")[::2]) for entry in entries}
    known |= {origin("holdfast", name) for name in re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)}
    missing = [
        f"{room}.{name}"
        for path in FILES
        for room in [dotted(path)]
        if room.removeprefix("holdfast.") not in INTERNAL
        for name in listed(path)
        if origin(room, name) not in known
    ]
    assert not missing


def listed(path: Path) -> list[str]:
    """Names in the `__all__` of a file; [] without one."""
    if path.with_suffix(".pyi").is_file():
        return sorted(read_stub(str(path)))
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def origin(module: str, name: str) -> str:
    """Dotted name of the file that defines a name of a module, read without importing it."""
    path = PACKAGE.parent / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    path = stub if (stub := path.with_suffix(".pyi")).is_file() else path
    if not path.is_file():
        return f"{module}.{name}"
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return origin(str(node.module), name)
    return f"{module}.{name}"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_folder_is_a_package(folder: Path) -> None:
    assert (folder / "__init__.py").is_file()


def test_the_architecture_names_files_and_folders_that_exist() -> None:
    """A path starts at the repository, the package or, in the four walks, the room `checkpoint`."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+(?:\.py|/))`", text))
    places = ROOT, PACKAGE, PACKAGE / "checkpoint"
    assert len(named) > 100
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []
