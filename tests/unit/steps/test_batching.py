"""How batches grow and shrink."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.steps.batching import MOST, TARGET_BYTES, TARGET_SECONDS, BatchSize


@given(cost=st.floats(1e-7, 1.0), nbytes=st.floats(1.0, 1e7))
def test_a_steady_cost_leads_to_the_targets(cost: float, nbytes: float) -> None:
    size = BatchSize()
    for _ in range(40):
        before = size.items
        size.observe(size.items, size.items * cost, size.items * nbytes)
        assert 1 <= size.items <= 4 * before
    ideal = min(TARGET_SECONDS / cost, TARGET_BYTES / nbytes, MOST)
    assert size.items == 1 or ideal / 2 <= size.items <= ideal + 1


def test_a_jump_is_believed_soon_and_a_drop_slowly() -> None:
    size = BatchSize()
    for _ in range(20):
        size.observe(size.items, size.items * 1e-6, size.items)
    large = size.items
    size.observe(1, 0.02, 1)
    assert size.items == 1 < large
    for _ in range(10):
        size.observe(size.items, size.items * 1e-6, size.items)
    assert size.items < large
    for _ in range(100):
        size.observe(size.items, size.items * 1e-6, size.items)
    assert size.items == large
