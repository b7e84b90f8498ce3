"""A look at the corpus before a run: the first records as they reach some operator.

Used to settle choices that must rest on the user's own data (which encoder is exact on this text), before any worker starts.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.block import Block, Origin
from headrace.core.op import BadRows
from headrace.core.plan import Node, projection
from headrace.run.feed import LaneSource, chunk_ids

SAMPLE_ROWS = 256


def sample_before(nodes: Sequence[Node], source: LaneSource, rows: int = SAMPLE_ROWS) -> Block | None:
    """The first `rows` samples of a lane after the stateless operators among `nodes`; None if none is left of them.

    Records that an operator refuses are left out here; the run itself will speak of them.
    """
    drawn = source.draw()
    if drawn is None or not len(drawn):
        return None
    block = Block(0, Origin(chunk_ids(drawn, 0)[:rows]), {})
    for node in nodes:
        if not node.stateful:
            op = node.op.projected(projection(nodes[1:])) if hasattr(node.op, "projected") else node.op
            block = op.worker()(block, BadRows())
            if not len(block):
                return None
    return block
