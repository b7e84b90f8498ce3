"""Rebuild packed rows from the documents they were made of, for a restore that holds rows behind the packer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace.core.block import Block, Ints, Origin, concat_blocks
from headrace.errors import CheckpointError, RecordError
from headrace.ops.pack.fields import AlignedFields
from headrace.ops.pack.shape import RowShape, packed_block, pad_rows, padding_of


def assemble_rows(records: Block, origin: Origin, fields: Callable[[], AlignedFields], shape: RowShape) -> Block:
    """Rows named by `origin` (with spans) from `records`: documents in any order, each at least once, maybe with others.

    Rows that were packed before and after a flush may have other fields; then each is put together by itself.
    """
    if origin.rows is None or origin.spans is None:
        raise CheckpointError("pack_flat: packed rows are named by segments and spans; this origin has none")
    try:
        return _assembled(records, origin, fields(), shape)
    except RecordError:
        rows = [origin.slice(row, row + 1) for row in range(len(origin))]
        return concat_blocks([_assembled(records, row, fields(), shape) for row in rows])


def _assembled(records: Block, origin: Origin, fields: AlignedFields, shape: RowShape) -> Block:
    """Rows whose documents have the same fields. Others among `records` (that packing refused) are not looked at."""
    assert origin.rows is not None and origin.spans is not None
    wanted = _find(records.origin.ids, origin.ids)
    _, first = np.unique(wanted, return_index=True)
    documents = fields.align(records.take(wanted[np.sort(first)]))
    starts = documents.offsets[_find(documents.ids, origin.ids)] + origin.spans[:, 0]
    padding = padding_of(origin, shape)
    bounds = list(zip(starts.tolist(), (starts + origin.spans[:, 1]).tolist(), strict=True))
    pieces: dict[str, list[NDArray[np.generic]]] = {
        name: [values[a:z] for a, z in bounds] for name, values in documents.values.items()
    }
    flat = pad_rows(pieces, origin.rows[1:].tolist(), padding, {fields.tokens: shape.pad_token_id or 0})
    return packed_block(records.lane, flat, origin, padding, shape)


def _find(ids: Ints, wanted: Ints) -> Ints:
    """Row of `ids` that equals each row of `wanted`."""
    rows = {row.tobytes(): number for number, row in enumerate(np.ascontiguousarray(ids))}
    try:
        return np.asarray([rows[row.tobytes()] for row in np.ascontiguousarray(wanted)], np.int64)
    except KeyError as missing:
        row = np.frombuffer(missing.args[0], np.int64).tolist()
        raise CheckpointError(
            f"pack_flat: dataset {row[0]}, shard {row[1]}, row {row[2]} (piece {row[6]}) is part of a packed row and was "
            "not read back; the data or an operator before packing has changed"
        ) from None
