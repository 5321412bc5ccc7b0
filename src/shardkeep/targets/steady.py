"""Reading one state of a checkpoint that another program may replace meanwhile.

Files of a replaced tree change only after the manifest. So if something looks damaged and the manifest is still the one
that was read, the damage is real. If it is another one, the checkpoint is read again, but not for ever.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from shardkeep.errors import IntegrityError
from shardkeep.model.manifest import Manifest

TRIES = 100  # how often reading starts over if other programs keep replacing the checkpoint


@dataclass
class Attempt(AbstractContextManager["Attempt", bool]):
    """The context in which a checkpoint is read once.

    Errors that a writer may have caused do not leave it if the checkpoint was replaced meanwhile.

    Args:
        before: What was committed when the attempt began.
        look: Reads what is committed now.

    Attributes:
        sure: Set this inside if what was read is known to be of one state. Otherwise the manifest is looked at again.
        replaced: Afterwards, whether the checkpoint was replaced meanwhile. What was read is not to be used then.
    """

    before: Manifest
    look: Callable[[], Manifest]
    sure: bool = False
    replaced: bool = False

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> bool:
        may_be_mixed = not self.sure
        if error is not None:
            may_be_mixed = isinstance(error, IntegrityError | FileNotFoundError)
        self.replaced = may_be_mixed and self.look().save_id != self.before.save_id
        return self.replaced
