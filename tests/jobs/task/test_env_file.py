"""Files of variables for `--env-file`: what python-dotenv makes of them, or a refusal with the line."""

from __future__ import annotations

import pytest

from holdfast.errors import InvalidInput
from holdfast.jobs.task.env_file import parse_env_file

CASES = [
    ("A=1", {"A": "1"}),
    ("A = b c  # comment\n\n# B=2\n  export C=3\n", {"A": "b c", "C": "3"}),
    ("A=b#c\nB= # d\nC=\n", {"A": "b#c", "B": "", "C": ""}),
    ("A='a # \\' b' # c\nB=\"x\\ty\\\"$z\"\n", {"A": "a # ' b", "B": 'x\ty"$z'}),
    ('A="two\nlines"\r\nB=1\r\n', {"A": "two\nlines", "B": "1"}),
    ("A=x\nB=${A}/${HOST}\nC='${A}'\nD=${NO:-d}${HOST:-d}\n", {"A": "x", "B": "x/h", "C": "x", "D": "dh"}),
    ("A=1\nA=2\n", {"A": "2"}),
    ("EXPORT=1\nexported=2\nA==b=c\n", {"EXPORT": "1", "exported": "2", "A": "=b=c"}),
    ("A=it's\n", {"A": "it's"}),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_a_file_of_variables_is_parsed(text: str, expected: dict[str, str]) -> None:
    assert parse_env_file(text, ".env", {"HOST": "h"}) == expected


@pytest.mark.parametrize(
    ("text", "line"),
    [
        *(("A=1\nsecret\n", 2), ("\n\nA-B=secret\n", 3), ("A='secret\n", 1)),
        *(('A="b" secret\n', 1), ("=secret", 1)),
    ],
)
def test_an_invalid_line_is_reported_without_its_content(text: str, line: int) -> None:
    with pytest.raises(InvalidInput, match=rf"^\.env:{line}: expected NAME=VALUE") as refused:
        parse_env_file(text, ".env", {})
    assert "secret" not in str(refused.value)


def test_a_reference_without_a_value_is_reported() -> None:
    with pytest.raises(InvalidInput, match=r"^\.env:2: \$\{NO\} has no value"):
        parse_env_file("A=1\nB=${NO}\n", ".env", {})
