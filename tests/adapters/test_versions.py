"""Check of the packages that an adapter needs."""

from __future__ import annotations

import pytest

from holdfast.adapters.versions import check_versions
from holdfast.errors import Unsupported


def test_a_missing_or_old_package_is_named_with_the_fix() -> None:
    check_versions("lightning", {"torch": (2, 6)})
    with pytest.raises(
        Unsupported, match=r"needs no-such-package 1\.2 .* not installed.*torch-holdfast\[lightning\]"
    ):
        check_versions("lightning", {"torch": (2, 6), "no-such-package": (1, 2)})
    with pytest.raises(Unsupported, match=r"needs torch 1000\.0 or later, and 2\..* is installed"):
        check_versions("lightning", {"torch": (1000, 0)})
