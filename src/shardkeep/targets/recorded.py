"""The files that a manifest records: opened only if they are there and have their size."""

import numpy as np

from shardkeep.errors import IntegrityError, MissingDataError, damage_of
from shardkeep.model.digests import digest
from shardkeep.model.manifest import DataFile
from shardkeep.stores.base import Store, StoredFile


def open_file(store: Store, record: DataFile, key: str | None = None) -> StoredFile:
    """A file of a tree, which is there and has its size. `key` is the leaf that it is opened for."""
    where = store.locate(record.name)
    try:
        file = store.open(record.name)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingDataError(f"{where} is missing", leaf=key, file=where) from None
    except IntegrityError as error:
        raise damage_of(error, key, where) from None
    if file.size == record.size:
        return file
    file.close()
    problem = f"{where} has {file.size:,} bytes instead of {record.size:,}"
    if file.size < record.size:
        problem = f"{where} is truncated: it has {file.size:,} of {record.size:,} bytes"
    raise IntegrityError(problem, leaf=key, file=where)


def read_table(store: Store, record: DataFile) -> bytes:
    """A file of a tree that is a table of pieces."""
    with open_file(store, record) as file:
        memory = np.empty(record.size, np.uint8)
        try:
            file.read_into(0, memory)
        except EOFError as error:
            raise damage_of(error, None, store.locate(record.name)) from error
    if digest(memory.data) != record.header_digest:
        where = store.locate(record.name)
        raise IntegrityError(f"{where} is damaged: it does not match its digest", file=where)
    return memory.tobytes()
