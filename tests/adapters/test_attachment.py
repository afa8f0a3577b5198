"""Attachment: the order of methods of an attached object, and the versions of packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.adapters.kit.run import check_versions, insert_class
from holdfast.errors import Unsupported


class Library:
    """Object of another library."""

    def save(self) -> list[str]:
        return ["library"]


class Script(Library):
    """Class derived in a user's script."""

    def save(self) -> list[str]:
        return ["script", *super().save()]


class Wrapping:
    """Class of an adapter, derived from nothing."""

    def save(self) -> list[str]:
        inner: Any = super()
        return ["wrapping", *inner.save()]


class Disguised(Library):
    """Object that claims to be of another class, as the loaders of Accelerate do."""

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - read only there too
        return int


def test_an_added_class_comes_first_before_the_class_of_the_object_itself() -> None:
    script = Script()
    insert_class(script, Wrapping, before=Script)
    assert script.save() == ["wrapping", "script", "library"]


def test_the_class_keeps_its_name_and_other_objects_keep_their_class() -> None:
    script, other = Script(), Script()
    insert_class(script, Wrapping, before=Library)
    kind, before = type(script), type(other)
    assert (kind.__name__, kind.__qualname__, kind.__module__, kind.__doc__) == (
        (before.__name__, before.__qualname__, before.__module__, before.__doc__)
    )
    assert other.save() == ["script", "library"]


def test_an_object_that_claims_another_class_gets_one_too() -> None:
    disguised = Disguised()
    insert_class(disguised, Wrapping, before=Disguised)
    assert disguised.save() == ["wrapping", "library"]
    assert disguised.__class__ is int


def test_a_missing_or_old_package_is_named_with_the_fix() -> None:
    check_versions("lightning", {"torch": (2, 6)})
    with pytest.raises(
        Unsupported, match=r"needs no-such-package 1\.2 .* not installed.*torch-holdfast\[lightning\]"
    ):
        check_versions("lightning", {"torch": (2, 6), "no-such-package": (1, 2)})
    with pytest.raises(Unsupported, match=r"needs torch 1000\.0 or later, and 2\..* is installed"):
        check_versions("lightning", {"torch": (1000, 0)})


def test_a_package_in_a_source_folder_needs_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package_without_metadata.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    check_versions("lightning", {"package_without_metadata": (1, 2)})
