"""What the laws of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.ops.pack import ordered


@pytest.fixture(scope="module", autouse=True)
def small_windows() -> Iterator[None]:
    """Windows of documents that small corpora fill: of 1024 they never would, or for thousands of samples a row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "WINDOW", 24)
        yield
