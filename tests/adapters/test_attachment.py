"""Attachment: the order of methods of an attached object, refused attachments, versions of packages."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.adapters.kit.attachment import check_attach, check_versions, insert_class
from holdfast.errors import InvalidInput, Unsupported


class Library:
    """Object of another library."""

    def save(self) -> list[str]:
        return ["library"]


class Script(Library):
    """Class derived in a user's script."""

    def save(self) -> list[str]:
        return ["script", *super().save()]


class Added(Library):
    """Class of an adapter, which replaces a method."""

    def save(self) -> list[str]:
        return ["added"]


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


def test_methods_of_a_script_run_first_and_their_super_calls_reach_the_added_class() -> None:
    script = Script()
    assert insert_class(script, Added, before=Library) is script
    assert script.save() == ["script", "added"]
    assert isinstance(script, (Script, Added))


def test_an_object_of_the_library_itself_gets_the_added_methods() -> None:
    plain = Library()
    insert_class(plain, Added, before=Library)
    assert plain.save() == ["added"]


def test_an_added_class_comes_first_before_the_class_of_the_object_itself() -> None:
    script = Script()
    insert_class(script, Wrapping, before=Script)
    assert script.save() == ["wrapping", "script", "library"]


def test_the_class_keeps_its_name_and_other_objects_keep_their_class() -> None:
    script, other = Script(), Script()
    insert_class(script, Added, before=Library)
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


def test_options_that_the_object_decides_are_refused_with_the_fix() -> None:
    check_attach(Script(), Added, {"memory": "1GiB"}, {"every": "set save_steps"}, name="Trainer")
    with pytest.raises(InvalidInput, match=r"not take every=: set save_steps\. The Trainer was not changed"):
        check_attach(Script(), Added, {"every": None}, {"every": "set save_steps"}, name="Trainer")


def test_an_object_is_attached_once() -> None:
    script = Script()
    insert_class(script, Added, before=Library)
    with pytest.raises(InvalidInput, match=r"This Trainer is already attached\. Call attach\(\) once"):
        check_attach(script, Added, {}, {}, name="Trainer")


def test_a_missing_or_old_package_is_named_with_the_fix() -> None:
    check_versions("lightning", {"torch": (2, 6)})
    with pytest.raises(
        Unsupported, match=r"needs no-such-package 1\.2 .* not installed.*torch-holdfast\[lightning\]"
    ):
        check_versions("lightning", {"torch": (2, 6), "no-such-package": (1, 2)})
    with pytest.raises(Unsupported, match=r"needs torch 1000\.0 or later, and 2\..* is installed"):
        check_versions("lightning", {"torch": (1000, 0)})
