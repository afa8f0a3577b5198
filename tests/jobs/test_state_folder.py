from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import InvalidInput
from holdfast.jobs.folder import state_dir


@pytest.mark.parametrize("kind", ["a file", "below a file", "a long name"])
def test_a_folder_that_cannot_be_made_is_an_error_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "file").write_text("x")
    name = {"a file": "file", "below a file": "file/jobs", "a long name": "a" * 3000}[kind]
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / name))
    with pytest.raises(InvalidInput, match="Set HOLDFAST_STATE to a folder of yours") as caught:
        state_dir()
    assert len(str(caught.value)) < 500
