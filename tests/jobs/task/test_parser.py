"""Task files: what SkyPilot accepts is accepted, and what it would reject is rejected with its line."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidInput, NotFound, Unsupported
from holdfast.jobs.task.document import read_table, to_yaml
from holdfast.jobs.task.model import Accelerators, MountMode, Task, parse_accelerators
from holdfast.jobs.task.parser import Overrides, command_task, load_tasks, parse_tasks
from holdfast.jobs.task.problems import RESOURCES, TASK
from jobs.task.guide import SNIPPETS


def task_of(text: str, **envs: str) -> Task:
    return parse_tasks(text, "task.yaml", Overrides(envs=envs)).only()


def refusal(text: str) -> str:
    with pytest.raises(InvalidInput) as refused:
        task_of(text)
    return str(refused.value)


@pytest.mark.parametrize("name", SNIPPETS)
def test_every_snippet_of_the_guide_is_parsed(name: str) -> None:
    assert task_of(SNIPPETS[name], WANDB_API_KEY="key").run


def test_the_guide_s_folded_accelerators_are_the_intended_set() -> None:
    task = task_of(SNIPPETS["accelerators"])
    assert task.accelerators.choices == (("A100", 1.0), ("A100-80GB", 1.0), ("H100", 1.0))
    assert "without a space" in task.notes[0]
    rendered = yaml.safe_load(to_yaml(task))["resources"]["accelerators"]
    assert rendered == {"A100": 1, "A100-80GB": 1, "H100": 1}


def test_the_guide_s_bert_task_is_parsed() -> None:
    task = task_of(SNIPPETS["bert"], WANDB_API_KEY="key")
    assert task.name == "bert-qa"
    assert task.accelerators.choices == (("V100", 1.0),)
    (mount,) = task.file_mounts
    assert (mount.target, mount.mode, mount.bucket) == ("/checkpoint", MountMode.MOUNT_CACHED, None)
    assert task.envs == {"WANDB_API_KEY": "key"}
    assert "--run_name $SKYPILOT_TASK_ID" in task.run


def test_keys_for_other_engines_are_kept_unchanged() -> None:
    for name in ("efa", "gpudirect"):
        task = task_of(SNIPPETS[name])
        assert yaml.safe_load(to_yaml(task))["config"] == yaml.safe_load(SNIPPETS[name])["config"]


@pytest.mark.parametrize(
    ("asked", "choices", "is_ordered"),
    [
        ("A100", [("A100", 1)], False),
        ("A100:8", [("A100", 8)], False),
        ("T4:0.5", [("T4", 0.5)], False),
        ("tpu-v3-8", [("tpu-v3-8", 1)], False),
        ({"A100": 8}, [("A100", 8)], False),
        ({"A100": None}, [("A100", 1)], False),
        ({"A100:1": None, "V100:2": None}, [("A100", 1), ("V100", 2)], False),
        (["A100:1", "V100"], [("A100", 1), ("V100", 1)], True),
        ("A100:1 V100:2", [("A100", 1), ("V100", 2)], False),
        (None, [], False),
    ],
)
def test_accelerators_in_all_forms(asked: object, choices: list[object], is_ordered: bool) -> None:
    read = parse_accelerators(asked)
    assert isinstance(read, Accelerators)
    assert list(read.choices) == choices
    assert read.is_ordered == is_ordered
    again = parse_accelerators(read.plain() if choices else None)
    assert isinstance(again, Accelerators)
    assert (again.choices, again.is_ordered) == (read.choices, read.is_ordered)


AMOUNT = "expected an amount of memory"
WRONG = {
    "cpus: %s": (("lots", "-1", "0", "nan", "4GB"), "cpus: expected a number of CPUs"),
    "memory: %s": (("-3", "0", "much", "32XB"), f"memory: {AMOUNT}"),
    "any_of: [{memory: %s}]": (("-3", "much"), f"any_of[0].memory: {AMOUNT}"),
    "accelerators: %s": (("A100:x", "':8'", "[A100, 'B:']", "{'A:b': 1}", "'  '"), "accelerators: expected "),
}


@pytest.mark.parametrize(
    ("text", "value"), [(text, one) for text, (values, _) in WRONG.items() for one in values]
)
def test_an_invalid_amount_is_rejected(text: str, value: str) -> None:
    said = f"task.yaml:3: resources.{WRONG[text][1]}"
    assert said in refusal(f"run: x\nresources:\n  {text % value}\n")


@pytest.mark.parametrize("resources", ["cpus: 4+, memory: 32+", "cpus: 0.5, memory: 4x", "memory: 128GB"])
def test_amounts_of_skypilot_are_accepted(resources: str) -> None:
    assert parse_tasks(f"run: x\nresources: {{{resources}}}", "task.yaml", Overrides()).only().run == "x"


def test_problems_have_a_line_a_path_an_expectation_and_the_nearest_word() -> None:
    said = refusal(
        "run: x\nresources:\n  disk_tier: bset\n  job_recovery:\n    max_restart_on_errors: 3\n"
        "  any_of:\n    - use_spot: maybe\nfile_mounts:\n  /c:\n    mode: MOUNT_CACHE\n"
        "resorces:\n  cpus: 2\nnum_nodes: two\n"
    )
    for line in (
        "task.yaml:3: resources.disk_tier: expected one of low, medium, high, ultra, best, none, found "
        "'bset' Did you mean 'best'?",
        "task.yaml:5: resources.job_recovery.max_restart_on_errors: unknown key",
        "task.yaml:7: resources.any_of[0].use_spot: expected true or false, found 'maybe'",
        "task.yaml:10: file_mounts./c.mode: expected one of MOUNT, COPY, MOUNT_CACHED, found "
        "'MOUNT_CACHE' Did you mean 'MOUNT_CACHED'?",
        "task.yaml:11: resorces: unknown key 'resorces' at the top of a task. Did you mean 'resources'?",
        "task.yaml:13: num_nodes: expected a whole number, found 'two'",
    ):
        assert line in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ":1: the file is empty"),
        ("- a\n- b\n", "expected a map of keys, found a list"),
        ("name: x\n", "run: expected the commands of the job, found nothing"),
        ("run: a\nrun: b\n", ":2: duplicate key 'run', also in line 1"),
        ("run: [a\n", "invalid YAML"),
        ("name: x\nrun: echo \x07\n", ":2: U+0007 is not allowed in YAML. Remove it."),
        ("run: x\nenvs:\n  A:\n", ":3: envs.A: A has no value: give it here, or with --env A=VALUE"),
        ("run: x\nsecrets: [T]\n", "T has no value: give it here, or with --secret T=VALUE, or --secret T"),
        ("run: x\nenvs:\n  a-b: 1\n", "expected the name of a variable"),
        ('run: x\nenvs:\n  A: "a\\0b"\n', "expected a text without NUL characters"),
        ("service: {}\n", "are not jobs; start this one with SkyPilot: `sky serve up FILE`"),
        ("pool: {}\n", "`sky jobs pool apply FILE`"),
        ("\nresources: {gpus: A, accelerators: B}\n", ":2: resources.gpus: another name of accelerators"),
        ("run: x\nresources: {gpus: A100:x}\n", ":2: resources.accelerators: expected NAME"),
        ("resources: {any_of: [{}], ordered: [{}]}\n", "expected one of any_of and ordered, found both"),
        ("run: x\nenvs: {S: no}\nfile_mounts: {/a: {name: b, store: $S}}\n", "a.store: expected one of S3"),
        ("run: x\nnum_nodes: 0\n", "at least 1"),
    ],
)
def test_an_invalid_file_is_rejected_with_an_explanation(text: str, said: str) -> None:
    assert said in refusal(text)


@pytest.mark.parametrize(
    ("resources", "choices", "is_ordered"),
    [
        ("{gpus: A100:8}", [("A100", 8)], False),
        ("{gpus: {A100: 1, H100: 2}}", [("A100", 1), ("H100", 2)], False),
        ("{any_of: [{accelerators: A100:8}, {gpus: H100:4}]}", [("A100", 8), ("H100", 4)], False),
        ("{ordered: [{gpus: A}, {accelerators: [B:2, C:2]}]}", [("A", 1), ("B", 2), ("C", 2)], True),
        ("{accelerators: T4:2, any_of: [{use_spot: true}, {gpus: V100}]}", [("T4", 2), ("V100", 1)], False),
        ("{any_of: [{use_spot: true}, {use_spot: false}]}", [], False),
    ],
)
def test_accelerators_are_found_in_aliases_and_alternatives(
    resources: str, choices: list[object], is_ordered: bool
) -> None:
    task = task_of(f"resources: {resources}\nrun: x\n")
    assert list(task.accelerators.choices) == choices
    assert task.accelerators.is_ordered == is_ordered
    rendered = to_yaml(task)
    assert "gpus" not in rendered  # other versions of SkyPilot do not have the alias
    assert task_of(rendered).accelerators == task.accelerators


def test_folded_accelerators_of_an_alternative_are_unfolded() -> None:
    task = task_of("resources:\n  any_of:\n    - gpus:\n        A100:1\n        H100:1\nrun: x\n")
    (alternative,) = yaml.safe_load(to_yaml(task))["resources"]["any_of"]
    assert alternative == {"accelerators": {"A100": 1, "H100": 1}}
    assert "line 4: resources.accelerators: without a space" in task.notes[0]


def test_variables_are_filled_in_before_a_mount_is_checked() -> None:
    text = "envs: {STORE: s3, MODE: }\nfile_mounts: {/a: {name: b, store: $STORE, mode: '${MODE}'}}\nrun: x\n"
    task = task_of(text, MODE="MOUNT_CACHED")
    assert [(one.mode, one.spec["store"]) for one in task.file_mounts] == [(MountMode.MOUNT_CACHED, "s3")]
    secret = "secrets: {S: abc123}\nfile_mounts: {/a: {name: b, store: $S}}\nrun: x\n"
    assert "abc123" not in refusal(secret)


def test_a_file_may_be_mounted_at_its_own_path() -> None:
    text = "run: x\nfile_mounts: {~/.kaggle/a: ~/.kaggle/a, /d/../b: /b, ~/c: ~/d, c: /c, /s: 's3://s'}\n"
    assert [one.is_in_place for one in task_of(text).file_mounts] == [True, True, False, False, False]


def overridden(text: str, **options: object) -> Task:
    return parse_tasks(text, "task.yaml", Overrides(**options)).only()  # pyright: ignore[reportArgumentType]


def test_options_of_the_command_line_take_the_place_of_keys() -> None:
    text = "name: a\nnum_nodes: 1\nworkdir: /a\nresources: {cpus: 2, gpus: T4}\nrun: x\n"
    task = overridden(text, name="b", num_nodes=3, workdir="/b", accelerators="H100:8")
    assert (task.name, task.num_nodes, task.workdir) == ("b", 3, "/b")
    assert task.accelerators.choices == (("H100", 8.0),)
    document = yaml.safe_load(to_yaml(task))
    assert document["resources"] == {"cpus": 2, "accelerators": "H100:8"}
    assert (document["name"], document["num_nodes"], document["workdir"]) == ("b", 3, "/b")


def test_gpus_of_the_command_line_are_those_of_all_alternatives() -> None:
    text = "resources: {any_of: [{accelerators: A100, infra: aws}, {gpus: V100}]}\nrun: x\n"
    task = overridden(text, accelerators="H100:2")
    assert task.accelerators.choices == (("H100", 2.0),)
    resources = yaml.safe_load(to_yaml(task))["resources"]
    assert resources == {"any_of": [{"infra": "aws"}, {}], "accelerators": "H100:2"}
    assert overridden(text, accelerators="none").accelerators.choices == ()
    assert overridden("run: x\n", accelerators="H100:2").accelerators.num_per_node == 2


def test_a_command_is_a_task() -> None:
    task = command_task("echo 'a: b' # \u00e9\U0001f600", Overrides(envs={"A": "1"})).only()
    assert (task.name, task.run, task.envs) == ("command", "echo 'a: b' # \u00e9\U0001f600", {"A": "1"})
    assert task.workdir == str(Path.cwd())


PIPELINE = "name: p\n---\nname: a\nrun: x\n---\nenvs: {N: }\nrun: y $N\n"


def test_a_pipeline_has_a_header_and_tasks() -> None:
    """With the names that SkyPilot gives."""
    file = parse_tasks(PIPELINE, "task.yaml", Overrides(envs={"N": "3"}))
    assert file.name == "p"
    assert [(task.name, task.run) for task in file.tasks] == [("a", "x"), ("p-1", "y $N")]
    assert file.tasks[1].lines["run"] == 7
    assert [task.envs for task in file.tasks] == [{"N": "3"}, {"N": "3"}]
    assert parse_tasks(PIPELINE, "f/task.yaml", Overrides(name="q", envs={"N": "3"})).name == "q"
    assert parse_tasks("---\nrun: x\n---\n---\nrun: y\n", "f/task.yaml").name == "task"
    serial = parse_tasks("name: p\nexecution: serial\n---\nrun: x\n---\nrun: y\n", "task.yaml")
    assert [task.name for task in serial.tasks] == ["p-0", "p-1"]


def test_a_header_with_one_task_is_a_task() -> None:
    assert task_of("name: p\n---\nname: a\nrun: x\n").name == "p"
    with pytest.raises(Unsupported, match="expected one task, found 2"):
        task_of("run: x\n---\nrun: y\n")


def test_problems_of_all_tasks_are_reported() -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_tasks("name: p\n---\nrun: x\nsetpu: y\n---\nname: b\n", "task.yaml")
    assert "task.yaml:4: setpu: unknown key" in str(refused.value)
    assert "task.yaml:6: run: expected the commands" in str(refused.value)


def test_job_groups_and_unclear_options_of_pipelines_are_refused() -> None:
    group = "name: g\nexecution: parallel\n---\nrun: x\n---\nrun: y\n"
    said = r"task\.yaml:2: execution: parallel makes a job group.*sky jobs launch"
    with pytest.raises(Unsupported, match=said):
        parse_tasks(group, "task.yaml")
    with pytest.raises(InvalidInput, match="expected serial, found 'both'"):
        parse_tasks(group.replace("parallel", "both"), "task.yaml")
    with pytest.raises(InvalidInput, match=r"--num-nodes is for a file with one task, and task\.yaml has 2"):
        parse_tasks(PIPELINE, "task.yaml", Overrides(num_nodes=2))


def test_a_missing_file_is_not_found(tmp_path) -> None:
    with pytest.raises(NotFound, match=r"The task file .* does not exist"):
        load_tasks(tmp_path / "none.yaml")


def test_variables_are_filled_in_in_paths() -> None:
    mounts = "file_mounts:\n  /c:\n    name: ${BUCKET}-$N\n  /d: /data/${OTHER}\n"
    task = task_of("envs: {BUCKET: b, N: 3}\n" + mounts + "run: echo $N\n", N="4")
    assert [one.bucket or one.source for one in task.file_mounts] == ["b-4", "/data/${OTHER}"]
    assert task.envs == {"BUCKET": "b", "N": "4"}
    assert task.run == "echo $N"


def test_secrets_are_never_written_out() -> None:
    task = parse_tasks("secrets: {TOKEN: abc}\nrun: x\n", "t.yaml", Overrides()).only()
    assert task.secrets == {"TOKEN": "abc"}
    assert "abc" not in to_yaml(task)


def test_recovery_is_parsed() -> None:
    text = "run: x\nresources: {job_recovery: {max_restarts_on_errors: 3, recover_on_exit_codes: %s}}\n"
    recovery = task_of(text % "[33, 34]").recovery
    assert (recovery.max_restarts, recovery.free_codes) == (3, {33, 34})
    assert task_of(text % 33).recovery.free_codes == {33}
    assert "137" in task_of(text % 137).notes[0]


def test_merged_maps_may_be_overridden() -> None:
    task = task_of("envs: &a {X: 1}\nresources:\n  labels:\n    <<: *a\n    X: 2\nrun: x\n")
    assert yaml.safe_load(to_yaml(task))["resources"]["labels"] == {"X": 2}


def test_the_schema_has_all_keys() -> None:
    assert {"run", "setup", "workdir", "file_mounts", "secrets", "config"} <= set(TASK.shapes)
    assert {"accelerators", "use_spot", "any_of", "job_recovery", "network_tier"} <= set(RESOURCES)
    mounts = TASK.shapes["file_mounts"].either[0].inner
    assert mounts is not None
    assert {"name", "source", "mode", "type"} <= set(mounts.either[1].shapes)


def test_the_keys_that_engines_ignore_are_in_the_schema() -> None:
    for key, of_engines in read_table("task/unsupported_keys.yaml").items():
        top, _, inner = key.partition(".")
        assert top in TASK.shapes
        assert not inner or inner.partition(".")[0] in RESOURCES
        assert isinstance(of_engines, str) or of_engines.keys() <= {"local", "slurm", "k8s"}


plain = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
keys = st.sampled_from([*TASK.shapes, *RESOURCES, "x"])
trees = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)


@given(st.dictionaries(st.sampled_from([*TASK.shapes, "x"]), trees, max_size=5))
def test_any_file_is_parsed_or_rejected_with_an_explanation(tree: dict[str, object]) -> None:
    """No file makes the parser fail in any other way, and a parsed file can be parsed again."""
    task = None
    with contextlib.suppress(InvalidInput, Unsupported):
        task = task_of(yaml.safe_dump(tree))
    if task is None:
        return
    again = task_of(to_yaml(task), **task.secrets)
    assert again.run == task.run
    assert again.accelerators.choices == task.accelerators.choices


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("name: x\nrun: echo café\n".encode("latin-1"), r":2: expected UTF-8, found the byte 0xe9.* Latin-1"),
        ("name: x\nrun: a\n".encode("utf-16"), ":1: expected UTF-8, found UTF-16"),
        ("name: x\nrun: a\n".encode("utf-16-le"), r":1: U\+0000 is not allowed"),
    ],
)
def test_a_file_in_another_encoding_is_refused_with_its_line(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "task.yaml"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=said + r".*Save it as UTF-8\."):
        load_tasks(path)
    path.write_bytes(b"\xef\xbb\xbfname: x\nrun: a\n")
    assert load_tasks(path).name == "x"
