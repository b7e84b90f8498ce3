"""Laws 1, 2, 4 and 5 for every stateful operator: settings are not data, resume is invisible, a checkpoint is a function
of the position, nothing is lost uncounted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_streams import Tally, as_objects, cut, find, restored, rows_of, run, snapshot, stream, tokens_out

from headrace.core.block import Origin
from headrace.ops.batch import Batch
from headrace.ops.mixture import EnsureMixture
from headrace.ops.pack.domains import DomainGroups
from headrace.ops.pack.flat import PackFlat
from headrace.ops.shuffle import Shuffle

OPERATORS: dict[str, Any] = {
    "shuffle": Shuffle(buffer_size=40, seed=3),
    "shuffle-one": Shuffle(buffer_size=1),
    "shuffle-large": Shuffle(buffer_size=1000, seed=1),
    "shuffle-block": Shuffle(buffer_size=7, algorithm="block"),
    "shuffle-warmup": Shuffle(buffer_size=40, algorithm="block_warmup"),
    "batch": Batch(4),
    "batch-keep": Batch(4, drop_last=False),
    "wrap": PackFlat(16, algorithm="wrap"),
    "wrap-padded": PackFlat(16, algorithm="wrap", pad_token_id=0, emit_positions=False),
    "wrap-capped": PackFlat(16, algorithm="wrap", pad_token_id=0, max_sequences_per_bin=2),
    "first-fit": PackFlat(16, num_bins=3, pad_token_id=0),
    "first-fit-capped": PackFlat(16, num_bins=5, pad_token_id=0, max_sequences_per_bin=2, flush_strategy="fullest"),
    "first-fit-many": PackFlat(16, num_bins=12, pad_token_id=0, max_sequences_per_bin=2),
    "first-fit-room": PackFlat(16, num_bins=4, pad_token_id=0, min_sequence_length=4),
    "best-fit": PackFlat(16, num_bins=4, pad_token_id=9, algorithm="best_fit"),
    "best-fit-wrap": PackFlat(16, pad_token_id=0, algorithm="best_fit_wrap", candidate_pool_size=4),
    "best-fit-wrap-capped": PackFlat(
        16,
        pad_token_id=0,
        algorithm="best_fit_wrap",
        candidate_pool_size=3,
        max_sequences_per_bin=2,
        max_candidate_age=5,
    ),
    "wrap-full": PackFlat(16, pad_token_id=0, algorithm="wrap", homogeneity="full"),
    "wrap-full-unpadded": PackFlat(16, algorithm="wrap", homogeneity="full"),
    "first-fit-full": PackFlat(16, num_bins=2, pad_token_id=0, homogeneity="full"),
    "best-fit-wrap-group": PackFlat(
        16,
        pad_token_id=0,
        algorithm="best_fit_wrap",
        candidate_pool_size=3,
        homogeneity="group",
        groups=DomainGroups({"even": ["a"], "odd": ["b"]}),
    ).with_components({"a": 0, "b": 1}),
    "first-fit-random": PackFlat(16, num_bins=3, pad_token_id=0, shuffle_strategy="random", shuffle_seed=4),
    "wrap-length": PackFlat(16, algorithm="wrap", shuffle_strategy="length"),
}

NAMES = {"a": 0, "b": 1}
OPERATORS |= {
    name: EnsureMixture(**settings).with_components(NAMES)
    for name, settings in {
        "mixture-tokens": {"targets": (("a", 3.0), ("b", 1.0)), "max_buffer_size": 6},
        "mixture-samples": {"targets": (("a", 1.0), ("b", 2.0)), "max_buffer_size": 9, "weight_by": "samples"},
        "mixture-one": {"targets": (("b", 1.0),), "max_buffer_size": 1, "drain_target_ratio": 0.5},
        "mixture-off": {"targets": (("a", 1.0), ("b", 0.0)), "obsolete_drain_rate": 0.5, "weight_by": "score"},
        "mixture-strict": {"targets": (("a", 1.0), ("b", 1.0)), "max_buffer_size": None, "obsolete_drain_rate": 0.0},
    }.items()
}

lengths = st.lists(st.one_of(st.integers(0, 20), st.sampled_from([15, 16, 17, 160])), max_size=60)
cuts = st.lists(st.integers(0, 60), max_size=12)

every_operator = pytest.mark.parametrize("op", OPERATORS.values(), ids=list(OPERATORS))


@every_operator
@settings(max_examples=25, deadline=None)
@given(lengths=lengths, first=cuts, second=cuts, objects=st.booleans())
def test_blocks_are_not_data(op: Any, lengths: list[int], first: list[int], second: list[int], objects: bool) -> None:
    """Any two cuts of a stream into blocks give the same rows, the same drops, and the same state on the way."""
    whole = as_objects(stream(lengths)) if objects else stream(lengths)
    one, two = run(op, cut(whole, first)), run(op, cut(whole, second))
    assert one.rows == two.rows
    assert sorted(one.dropped_ids) == sorted(two.dropped_ids)
    assert one.dropped_tokens == two.dropped_tokens

    middle = len(whole) // 2
    accumulators = [op.accumulator(0), op.accumulator(0)]
    for accumulator, at in zip(accumulators, (first, second), strict=True):
        for piece in cut(whole.slice(0, middle), at):
            accumulator.push(piece)
    assert snapshot(accumulators[0]) == snapshot(accumulators[1])


@every_operator
@settings(max_examples=25, deadline=None)
@given(lengths=lengths, stops=st.lists(st.integers(0, 60), min_size=1, max_size=4), flush=st.integers(0, 60))
def test_resume_is_invisible(op: Any, lengths: list[int], stops: list[int], flush: int) -> None:
    """Saved and restored at any records, once or several times, with a flush somewhere: the same rows and drops."""
    whole = stream(lengths)
    straight, resumed = Tally(), Tally()
    one = two = op.accumulator(0)
    two = op.accumulator(0)
    for row in range(len(whole) + 1):
        if row == min(flush, len(whole)):
            straight.add(one.flush())
            resumed.add(two.flush())
        if row in stops:
            two = restored(op, two, lambda origin: find(whole, origin))
            assert snapshot(one) == snapshot(two)
        if row < len(whole):
            straight.add(one.push(whole.slice(row, row + 1)))
            resumed.add(two.push(whole.slice(row, row + 1)))
    straight.add(one.end())
    resumed.add(two.end())
    assert straight.rows == resumed.rows
    assert sorted(straight.dropped_ids) == sorted(resumed.dropped_ids)
    assert straight.drop_reasons == resumed.drop_reasons


@every_operator
@settings(max_examples=15, deadline=None)
@given(lengths=lengths, cuts=cuts)
def test_a_flush_leaves_it_as_new(op: Any, lengths: list[int], cuts: list[int]) -> None:
    """After a flush nothing is held and the state is that of a fresh accumulator; batch alone carries rows over."""
    accumulator = op.accumulator(0)
    for piece in cut(stream(lengths), cuts):
        accumulator.push(piece)
    accumulator.flush()
    if isinstance(op, Batch) and op.drop_last:
        assert len(accumulator.held()) == len(lengths) % op.microbatch_size
        return
    assert snapshot(accumulator) == snapshot(op.accumulator(0))


@every_operator
@settings(max_examples=25, deadline=None)
@given(lengths=lengths, cuts=cuts, flush=st.integers(0, 12))
def test_every_record_is_accounted_for(op: Any, lengths: list[int], cuts: list[int], flush: int) -> None:
    """Every record begins in exactly one row that leaves, or is dropped once; tokens in = tokens out + counted drops."""
    whole = stream(lengths)
    accumulator, tally = op.accumulator(0), Tally()
    for number, piece in enumerate(cut(whole, cuts)):
        tally.add(accumulator.push(piece))
        if number == flush:
            tally.add(accumulator.flush())
    tally.add(accumulator.end())

    begun = [ids for block in tally.blocks for ids in _begun(block.origin)]
    assert sorted(begun + tally.dropped_ids) == sorted(whole.origin.ids.tolist())
    if isinstance(op, Shuffle):
        assert tally.dropped_ids == []
    if isinstance(op, PackFlat):
        left = tokens_out(tally.blocks)
        assert len(left) + tally.dropped_tokens == sum(lengths)
        assert len(set(left)) == len(left)


def _begun(origin: Origin) -> list[list[int]]:
    if origin.spans is None:
        return origin.ids.tolist()
    return origin.ids[origin.spans[:, 0] == 0].tolist()


@settings(max_examples=25, deadline=None)
@given(lengths=lengths, cuts=cuts)
def test_drops_of_the_input_are_passed_on(lengths: list[int], cuts: list[int]) -> None:
    """Word of a dropped record never stays behind in an accumulator."""
    from headrace.core.block import Drop

    whole = stream(lengths)
    for op in OPERATORS.values():
        pieces = [piece.dropping(Drop("filter", "filtered", np.zeros((1, 7), np.int64))) for piece in cut(whole, cuts)]
        tally = Tally()
        accumulator = op.accumulator(0)
        for piece in pieces:
            before = sum(count for reason, count in tally.drop_reasons if reason == "filtered")
            tally.add(accumulator.push(piece))
            assert sum(count for reason, count in tally.drop_reasons if reason == "filtered") == before + 1
        plain = run(op, cut(whole, cuts))
        tally.add(accumulator.end())
        assert rows_of(tally.blocks) == plain.rows
