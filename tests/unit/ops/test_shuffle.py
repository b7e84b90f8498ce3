"""`shuffle`: what its three algorithms do to an order, and how little a checkpoint of them holds."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headrace.core.block import Block, Origin, Ragged
from headrace.errors import CheckpointError, ConfigError
from headrace.ops.shuffle import Shuffle


def numbers(n: int, start: int = 0, lane: int = 0) -> Block:
    """Records that hold their own number."""
    ids = np.zeros((n, 7), np.int64)
    ids[:, 2] = ids[:, 5] = np.arange(start, start + n)
    return Block(lane, Origin(ids), {"number": np.arange(start, start + n)})


def order(op: Shuffle, n: int, per: int = 64, lane: int = 0) -> list[int]:
    accumulator = op.accumulator(lane)
    blocks = [b for at in range(0, n, per) for b in accumulator.push(numbers(min(per, n - at), at, lane))]
    blocks += accumulator.end()
    return [int(value) for block in blocks for value in block.columns["number"]]


@pytest.mark.parametrize("algorithm", ["streaming", "block", "block_warmup"])
def test_it_is_a_permutation_that_depends_on_seed_and_lane(algorithm: str) -> None:
    op = Shuffle(100, seed=1, algorithm=algorithm)
    one = order(op, 1000)
    assert sorted(one) == list(range(1000))
    assert one != list(range(1000))
    assert one == order(op, 1000)
    assert one != order(Shuffle(100, seed=2, algorithm=algorithm), 1000)
    assert one != order(op, 1000, lane=1)


def test_streaming_mixes_as_far_as_its_buffer() -> None:
    """B107: a shuffle that hardly shuffles. In the long run a record waits `buffer_size` arrivals on average."""
    size, n = 500, 20_000
    delays = np.argsort(order(Shuffle(size, seed=5), n)) - np.arange(n)
    middle = delays[2 * size : n - 10 * size]
    assert abs(middle.mean()) < 0.1 * size  # leaves buffer_size arrivals late, that is where the output stands
    assert 0.8 * size < middle.std() < 1.2 * size


def test_streaming_starts_after_few_records() -> None:
    op = Shuffle(8192)
    accumulator = op.accumulator(0)
    assert accumulator.push(numbers(op.start_size)) == []
    assert len(accumulator.push(numbers(2, op.start_size))[0]) == 1
    assert op.start_size == 128


def test_spans_between_flushes_are_permuted_unlike() -> None:
    op = Shuffle(50, seed=1)
    accumulator = op.accumulator(0)
    spans = []
    for start in (0, 300):
        blocks = accumulator.push(numbers(300, start)) + accumulator.flush()
        spans.append([int(v) - start for b in blocks for v in b.columns["number"]])
    assert sorted(spans[0]) == sorted(spans[1]) == list(range(300))
    assert spans[0] != spans[1]


def test_block_warmup_grows_to_the_buffer_size() -> None:
    accumulator = Shuffle(64, algorithm="block_warmup", warmup_growth=2).accumulator(0)
    sizes = [len(b) for b in accumulator.push(numbers(300))]
    assert sizes == [4, 8, 16, 32, 64, 64, 64]


def test_a_checkpoint_of_8192_records_is_a_count() -> None:
    accumulator = Shuffle(8192).accumulator(0)
    for at in range(0, 40_000, 500):
        accumulator.push(numbers(500, at))
    held = accumulator.held()
    assert len(held) == 8192
    assert (np.diff(held.ids[:, 2]) > 0).all()  # in order of arrival
    assert len(msgspec.msgpack.encode(accumulator.state())) < 64


def test_restoring_finds_every_slot_again() -> None:
    op = Shuffle(300, seed=9)
    accumulator, again = op.accumulator(0), op.accumulator(0)
    for at in range(0, 5000, 100):
        accumulator.push(numbers(100, at))
    held = accumulator.held()
    again.restore(accumulator.state(), numbers(5000).take(held.ids[:, 2]))
    tails = []
    for each in (accumulator, again):
        blocks = each.push(numbers(700, 5000)) + each.end()
        tails.append([int(v) for b in blocks for v in b.columns["number"]])
    assert tails[0] == tails[1]


def test_restoring_other_records_is_an_error() -> None:
    op = Shuffle(30)
    accumulator = op.accumulator(0)
    accumulator.push(numbers(100))
    with pytest.raises(CheckpointError, match="30 buffered records and 29 were read back"):
        op.accumulator(0).restore(accumulator.state(), numbers(29))


def test_memory_is_bounded_by_the_buffer() -> None:
    """Blocks that have mostly left are copied together, so what is stored stays a few times what is held."""
    accumulator = Shuffle(200).accumulator(0)
    for at in range(0, 60_000, 50):
        accumulator.push(numbers(50, at))
        assert accumulator._pool.stored <= 3 * 200 + 1024


def test_payloads_of_every_kind_travel() -> None:
    """Ragged columns, lists and rows of objects, and blocks that are not alike."""
    objects = [{"number": i, "name": f"n{i}"} for i in range(40)]
    rows = numbers(40).with_rows(objects)
    ragged = numbers(40, 40).with_columns(
        {
            "number": np.arange(40, 80),
            "ids": Ragged(np.arange(80, dtype=np.int32), np.arange(0, 82, 2)),
        }
    )
    accumulator = Shuffle(8, seed=1).accumulator(0)
    blocks = accumulator.push(rows) + accumulator.push(ragged) + accumulator.push(numbers(40, 80)) + accumulator.end()
    payloads = {int(row["number"]): row for block in blocks for row in block.payloads()}
    assert sorted(payloads) == list(range(120))
    assert payloads[7]["name"] == "n7"
    assert payloads[45]["ids"].tolist() == [10, 11]
    assert "ids" not in payloads[100]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"buffer_size": 0}, "buffer_size must be at least 1, found 0"),
        ({"algorithm": "reservoir"}, "unknown algorithm 'reservoir'"),
        ({"warmup_growth": 1.0}, "warmup_growth must be greater than 1"),
    ],
)
def test_parameters_are_checked_at_once(parameters: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Shuffle(**parameters)
