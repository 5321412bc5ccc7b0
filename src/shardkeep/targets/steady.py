"""Reading one state of a checkpoint that another program may replace meanwhile.

Files of a replaced tree change only after the manifest. So if something looks damaged and the manifest is still the one
that was read, the damage is real. If it is another one, the checkpoint is read again, but not for ever.
"""

from collections.abc import Callable
from types import TracebackType

from shardkeep.errors import IntegrityError
from shardkeep.model.manifest import Manifest

TRIES = 100  # how often reading starts over if other programs keep replacing the checkpoint


class Attempt:
    """The context in which a checkpoint is read once.

    Errors that a writer may have caused do not leave it if the checkpoint was replaced meanwhile.

    Attributes:
        sure: Set this inside if what was read is known to be of one state. Otherwise the manifest is looked at again.
        replaced: Afterwards, whether the checkpoint was replaced meanwhile. What was read is not to be used then.
    """

    def __init__(self, before: Manifest, look: Callable[[], Manifest], *, forgives: bool = True) -> None:
        self._before, self._look, self._forgives = before, look, forgives
        self.sure = self.replaced = False

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> bool:
        may_be_mixed = not self.sure
        if error is not None:
            may_be_mixed = self._forgives and isinstance(error, IntegrityError | FileNotFoundError)
        self.replaced = may_be_mixed and self._look().save_id != self._before.save_id
        return self.replaced
