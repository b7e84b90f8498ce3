"""decode_text: what becomes text, what passes, what is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.block import Block, Origin, Text
from headrace.core.op import BadRows
from headrace.errors import ConfigError
from headrace.ops.decode import DecodeText


def block(values: list[Any] | Text, name: str = "text") -> Block:
    origin = np.zeros((len(values), 7), np.int64)
    origin[:, 2] = np.arange(len(values))
    return Block(0, Origin(origin), {name: values, "id": np.arange(len(values))})


def run(op: DecodeText, given: Block) -> tuple[list[dict[str, Any]], BadRows]:
    bad = BadRows()
    return op.worker()(given, bad).payloads(), bad


def test_bytes_become_text_and_newlines_become_one_kind():
    rows, bad = run(DecodeText(), block([b"a\r\nb\rc\n", "d\r\ne", "caf\u00e9".encode()]))
    assert [r["text"] for r in rows] == ["a\nb\nc\n", "d\ne", "caf\u00e9"]
    assert not bad.rows


def test_utf8_column_with_nothing_to_change_is_passed_on_as_it_is():
    column = Text.from_bytes([b"one", "zw\u00f6lf".encode(), b""])
    out = DecodeText().worker()(block(column), BadRows())
    assert out.columns is not None
    assert out.columns["text"] is column


@given(st.lists(st.text(), min_size=1), st.booleans(), st.booleans())
def test_column_and_list_forms_give_the_same_text(texts: list[str], newlines: bool, lower: bool):
    texts = [t.encode("utf-8", "ignore").decode() for t in texts]
    op = DecodeText(normalize_newlines=newlines, lowercase=lower)
    as_column, _ = run(op, block(Text.from_bytes([t.encode() for t in texts])))
    as_list, _ = run(op, block([t.encode() for t in texts]))
    assert as_column == as_list
    want = [t.replace("\r\n", "\n").replace("\r", "\n") if newlines else t for t in texts]
    assert [r["text"] for r in as_list] == [w.lower() if lower else w for w in want]


def test_undecodable_bytes_are_reported_and_their_neighbours_kept():
    rows, bad = run(DecodeText(), block([b"ok", b"\xff\xfe", b"fine"]))
    assert [r["text"] for r in rows] == ["ok", "fine"]
    assert bad.rows == [1]
    assert "'text'" in str(bad.errors[0])
    assert "0xff" in str(bad.errors[0])


def test_errors_and_encoding_are_those_of_python():
    assert run(DecodeText(errors="replace"), block([b"a\xff"]))[0][0]["text"] == "a\ufffd"
    assert run(DecodeText(encoding="latin-1"), block([b"caf\xe9"]))[0][0]["text"] == "caf\u00e9"


def test_text_is_not_decoded_twice_and_a_bad_row_changes_no_neighbour():
    column = Text.from_bytes(["caf\u00e9".encode(), b"caf\xe9", "\u00fc".encode()])
    rows, bad = run(DecodeText(encoding="latin-1"), block(column))
    assert [r["text"] for r in rows] == ["caf\u00e9", "caf\u00e9", "\u00fc"]
    assert not bad.rows


def test_none_stays_none_numbers_become_digits_lists_are_reported():
    rows, bad = run(DecodeText(), block([None, 5, 2.5, ["a"], True]))
    assert [r["text"] for r in rows] == [None, "5", "2.5"]
    assert bad.rows == [3, 4]
    assert "list" in str(bad.errors[0])


def test_records_that_are_no_mappings_are_reported():
    origin = np.zeros((2, 7), np.int64)
    rows, bad = run(DecodeText(), Block(0, Origin(origin), None, [{"text": b"x"}, "just a string"]))
    assert rows == [{"text": "x"}]
    assert bad.rows == [1]
    assert "str" in str(bad.errors[0])


def test_nested_field_is_decoded_in_a_copy():
    inner = {"body": b"a\r\n", "n": 1}
    rows, _ = run(DecodeText(fields=["doc.body"]), block([inner, {"n": 2}], "doc"))
    assert [r["doc"] for r in rows] == [{"body": "a\n", "n": 1}, {"n": 2}]
    assert inner["body"] == b"a\r\n"


def test_absent_field_is_nobodys_fault():
    rows, bad = run(DecodeText(fields=("other",)), block(["a"]))
    assert rows == [{"text": "a", "id": 0}]
    assert not bad.rows


@pytest.mark.parametrize(
    "settings", [{"encoding": "utf-9"}, {"encoding": "base64"}, {"errors": "hope"}, {"fields": ()}]
)
def test_wrong_settings_fail_where_they_are_made(settings: dict[str, Any]):
    with pytest.raises(ConfigError):
        DecodeText(**settings)


def test_description_and_needs():
    op = DecodeText(fields="doc.body")
    assert op.needs(frozenset({"id"})) == {"id", "doc", "doc.body"}
    assert op.needs(None) is None
    assert op.describe()["encoding"] == "utf-8"
    assert DecodeText(max_batch=4).describe() == DecodeText().describe()
