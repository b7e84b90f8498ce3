"""User functions: what they are handed, what they may return, and what is said when they misbehave."""

import itertools
import warnings
from typing import Any

import numpy as np
import pytest

from headrace.core.block import ORIGIN_WIDTH, Block, Origin, Ragged, Text, to_list
from headrace.core.equality import same
from headrace.core.op import BadRows
from headrace.errors import ConfigError, OperatorError, PayloadTypeError
from headrace.ops.map import Filter, MapBlock, MapTransform, Materialize, Select, require_callable


def block_of(rows: list[Any] | None = None, columns: dict[str, Any] | None = None) -> Block:
    n = len(rows) if rows is not None else len(next(iter((columns or {}).values())))
    ids = np.zeros((n, ORIGIN_WIDTH), np.int64)
    ids[:, 2] = np.arange(n)
    return Block(0, Origin(ids), columns, rows)


def run(op: Any, block: Block) -> tuple[Block, BadRows]:
    bad = BadRows()
    return op.worker()(block, bad), bad


def test_map_transform_maps_drops_and_reports() -> None:
    def fn(payload: dict[str, Any]) -> Any:
        if payload["x"] == 3:
            raise KeyError("three")
        return None if payload["x"] == 1 else {"y": payload["x"] * 10}

    out, bad = run(MapTransform(fn), block_of([{"x": i} for i in range(5)]))
    assert out.payloads() == [{"y": 0}, {"y": 20}, {"y": 40}]
    assert out.origin.ids[:, 2].tolist() == [0, 2, 4]
    assert [(d.operator, d.reason, d.ids[:, 2].tolist()) for d in out.drops] == [
        ("map_transform", "returned None", [1])
    ]
    assert bad.rows == [3] and isinstance(bad.errors[0], KeyError)


def test_map_transform_keeps_the_record_without_drop_none() -> None:
    out, _ = run(MapTransform(lambda p: None, drop_none=False), block_of([{"x": 1}]))
    assert out.payloads() == [{"x": 1}] and not out.drops


def test_a_function_that_edits_its_argument_does_not_edit_the_source() -> None:
    rows = [{"x": 1}]

    def edit(payload: dict[str, Any]) -> dict[str, Any]:
        payload["x"] = 2
        return payload

    out, _ = run(MapTransform(edit), block_of(rows))
    assert out.payloads() == [{"x": 2}] and rows == [{"x": 1}]


def test_a_function_that_disagrees_with_itself_is_named() -> None:
    counter = itertools.count()

    def draws(payload: dict[str, Any]) -> dict[str, Any]:
        return {"x": next(counter)}

    block = block_of([{"x": 1}])
    with pytest.raises(OperatorError, match=r"map_transform\(.*draws\) gave two results.*'x': 0.*'x': 1"):
        run(MapTransform(draws), block)
    with pytest.warns(RuntimeWarning, match="gave two results"):
        run(MapTransform(draws, validation="warn"), block)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(MapTransform(draws, validation="off"), block)


def test_a_predicate_that_disagrees_with_itself_is_named() -> None:
    counter = itertools.count()

    def coin(payload: dict[str, Any]) -> int:
        return next(counter) % 2

    block = block_of([{"x": 1}])
    with pytest.raises(OperatorError, match=r"filter\(.*coin\) gave two results.*False and then True"):
        run(Filter(coin), block)
    with pytest.warns(RuntimeWarning, match="gave two results"):
        run(Filter(coin, validation="warn"), block)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(Filter(coin, validation="off"), block)
        run(Filter(lambda p: next(counter) + 1), block)  # other values, the same answer


def test_a_predicate_that_edits_its_argument_edits_nothing() -> None:
    rows = [{"x": 1}, {"x": 0}]
    out, _ = run(Filter(lambda p: p.pop("x")), block_of(rows))
    assert out.payloads() == [{"x": 1}] and rows == [{"x": 1}, {"x": 0}]


def test_filter_counts_what_it_drops() -> None:
    out, bad = run(Filter(lambda p: 1 / p["x"] > 0.3), block_of([{"x": i} for i in range(5)]))
    assert [p["x"] for p in out.payloads()] == [1, 2, 3]
    assert out.drops[0].ids[:, 2].tolist() == [4] and bad.rows == [0]


def test_map_block_takes_and_gives_columns() -> None:
    columns = {
        "text": Text.from_bytes([b"a", b"bcd"]),
        "ids": Ragged.from_rows([np.array([1, 2]), np.array([3])]),
        "n": np.arange(2),
    }

    def fn(c: dict[str, Any]) -> Any:
        assert c["text"] == ["a", "bcd"] and isinstance(c["n"], np.ndarray)
        return {"len": np.array([len(t) for t in c["text"]]), "first": [int(r[0]) for r in c["ids"]]}

    out, _ = run(MapBlock(fn, validation="off"), block_of(columns=columns))
    assert to_list(out.column("len")) == [1, 3] and out.column("first") == [1, 3]


def test_map_block_keeps_rows_by_mask() -> None:
    def evens(c: dict[str, Any]) -> Any:
        keep = c["n"] % 2 == 0
        return {"n": c["n"][keep]}, keep

    out, _ = run(MapBlock(evens), block_of(columns={"n": np.arange(5)}))
    assert to_list(out.column("n")) == [0, 2, 4]
    assert out.drops[0].ids[:, 2].tolist() == [1, 3]


def test_map_block_that_depends_on_its_block_is_named() -> None:
    with pytest.raises(OperatorError, match="how the stream is cut into blocks"):
        run(MapBlock(lambda c: {"n": c["n"] - c["n"].mean()}), block_of(columns={"n": np.arange(6.0)}))


def test_a_block_function_that_works_in_place_is_applied_once() -> None:
    def thousand_more(c: dict[str, Any]) -> dict[str, Any]:
        c["n"] += 1000
        c["ids"][0] += 1
        return c

    columns = {"n": np.arange(6), "ids": [np.array([i]) for i in range(6)]}
    with pytest.raises(OperatorError, match="how the stream is cut into blocks"):
        run(MapBlock(thousand_more), block_of(columns=columns))
    out, _ = run(
        MapBlock(lambda c: thousand_more(c) if len(c["n"]) else c, validation="off"), block_of(columns=columns)
    )
    assert to_list(out.column("n")) == list(range(1000, 1006))

    def more(c: dict[str, Any]) -> dict[str, Any]:
        c["n"] += 1000
        return c

    out, _ = run(MapBlock(more), block_of(columns={"n": np.arange(6)}))
    assert to_list(out.column("n")) == list(range(1000, 1006))


def test_rows_that_a_block_function_can_use_have_its_fields_and_no_others() -> None:
    def fn(c: dict[str, Any]) -> dict[str, Any]:
        if 2 in c["n"]:
            raise ValueError("two")
        return {"m": c["n"] * 10}

    out, bad = run(MapBlock(fn), block_of(columns={"n": np.arange(5), "text": list("abcde")}))
    assert {name: to_list(column) for name, column in (out.columns or {}).items()} == {"m": [0, 10, 30, 40]}
    assert out.origin.ids[:, 2].tolist() == [0, 1, 3, 4] and bad.rows == [2]
    nothing, _ = run(MapBlock(lambda c: 1 / 0), block_of(columns={"n": np.arange(2)}))
    assert len(nothing) == 0


def test_a_function_may_change_arrays_that_are_read_only_where_they_lie() -> None:
    stored = np.arange(8).reshape(4, 2)
    ragged = Ragged(np.arange(4), np.arange(5))
    for array in (stored, ragged.values):
        array.flags.writeable = False

    def more(row: dict[str, Any]) -> dict[str, Any]:
        row["ids"] += 100
        row["r"] += 100
        return row

    out, bad = run(MapTransform(more), block_of(columns={"ids": stored, "r": ragged}))
    assert not bad.rows and [row["ids"].tolist() for row in out.payloads()] == (stored + 100).tolist()
    assert [row["r"].tolist() for row in out.payloads()] == [[100], [101], [102], [103]]


def test_map_block_refuses_records_without_named_fields_one_by_one() -> None:
    out, bad = run(MapBlock(lambda c: c), block_of([{"a": 1}, "text", {"a": 2}, 5]))
    assert out.column("a") == [1, 2] and out.origin.ids[:, 2].tolist() == [0, 2]
    assert bad.rows == [1, 3] and all(isinstance(error, PayloadTypeError) for error in bad.errors)
    assert str(bad.errors[0]) == "map_block takes records with named fields, found a str: use map_transform"


@pytest.mark.parametrize("columns", [True, False], ids=["columns", "rows"])
def test_map_block_reads_inside_of_fields(columns: bool) -> None:
    docs = [{"body": "a"}, {"body": "b"}]
    block = block_of(columns={"doc": docs, "x": [1, 2]}) if columns else block_of([{"doc": d, "x": 1} for d in docs])
    out, _ = run(MapBlock(lambda c: {"upper": [t.upper() for t in c["doc.body"]]}, frozenset({"doc.body"})), block)
    assert out.column("upper") == ["A", "B"]


def test_select_keeps_whole_fields() -> None:
    sample = block_of([{"doc": {"body": "a"}, "x": 1}])
    with pytest.raises(
        ConfigError, match=r"select\('doc.body'\): this lies inside the field 'doc'.* take select\('doc'\)"
    ):
        Select(("doc.body",)).prepare(sample)
    flat = block_of([{"doc.body": "a", "x": 1}])
    op = Select(("doc.body",)).prepare(flat)
    assert run(op, flat)[0].payloads() == [{"doc.body": "a"}]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda c: {"n": c["n"][:1]}, "column 'n' has 1 rows, expected 4"),
        (lambda c: [1], "returned list; return a dict of columns"),
        (lambda c: ({"n": c["n"]}, [True]), r"keep has shape \(1,\), the block 4 rows"),
    ],
)
def test_map_block_says_what_is_wrong(fn: Any, message: str) -> None:
    with pytest.raises(OperatorError, match=message):
        run(MapBlock(fn), block_of(columns={"n": np.arange(4)}))


def test_select_keeps_fields_and_narrows_the_projection() -> None:
    op = Select(("a", "b"))
    assert op.needs(None) == {"a", "b"} and op.needs(frozenset({"b", "c"})) == {"b"}
    out, _ = run(op, block_of(columns={"a": np.arange(2), "c": np.arange(2)}))
    assert list(out.columns or {}) == ["a"]
    assert run(op, block_of([{"b": 1, "z": 2}, 5]))[0].rows == [{"b": 1}, 5]
    with pytest.raises(ConfigError, match="at least one field name"):
        Select(())


def test_materialize_passes_on() -> None:
    block = block_of([1, 2])
    assert run(Materialize(), block)[0] is block


def test_what_cannot_be_called_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"filter\(\) takes a function, got int: 5"):
        require_callable(5, "filter")


def test_equality_knows_arrays_and_nan() -> None:
    assert same({"a": np.array([1.0, np.nan])}, {"a": np.array([1.0, np.nan])})
    assert not same({"a": np.array([1, 2])}, {"a": np.array([1, 3])})
    assert not same([1, 2], [1, 2, 3]) and same([float("nan")], [float("nan")]) and not same({"a": 1}, {"b": 1})
