"""The rows of the table in a manifest, taken out to be changed and put back."""

import base64
from typing import Any

from shardkeep.model.arrays import dtype_from_name
from shardkeep.model.cells import CellGrid
from shardkeep.model.digests import block_count
from shardkeep.model.tables import PieceTable, TableRow, encode_table


def rows_of(tree: dict[str, Any]) -> list[TableRow]:
    """The rows of the only table of a tree, which is in the manifest."""
    (entry,) = tree["tables"]
    table = PieceTable(base64.b64decode(entry["data"]))
    found: list[TableRow] = []
    for number, leaf in enumerate(tree["leaves"]):
        run = table.run(number)
        digest = run.first_digest
        for row in range(run.first, run.last):
            shape = tuple(leaf["shape"])
            grid = CellGrid.decode(shape, leaf["grid"]) if "grid" in leaf else CellGrid.whole(shape)
            count = block_count(grid.region(table.cells[row]).size * dtype_from_name(leaf["dtype"]).itemsize)
            stored = table.stored[row] or None if table.packed else None
            digests = table.digests(digest, count)
            found.append(TableRow(number, table.cells[row], table.files[row], table.offsets[row], stored, digests))
            digest += count
    return found


def put_rows(tree: dict[str, Any], rows: list[TableRow]) -> None:
    """Give a tree a table with other rows."""
    tree["tables"] = [{"data": base64.b64encode(encode_table(rows)).decode()}]


def changed(row: TableRow, **fields: Any) -> TableRow:
    """A row with other values in some of its columns."""
    values = {name: getattr(row, name) for name in ("leaf", "cell", "file", "offset", "stored", "digests")}
    return TableRow(**{**values, **fields})
