"""Keys as people type them: `/` or `.` between names, compared by one spelling where that is unambiguous."""

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")


def loose_key(path: Sequence[str]) -> str:
    r"""The spelling by which keys are compared: every `.` and `/`, escaped or not, separates names.

    >>> loose_key(("params", "layers", "0")), loose_key(("params.layers/0",)), loose_key((r"params\.layers", "0"))
    ('params/layers/0', 'params/layers/0', 'params/layers/0')
    """
    key = "/".join(path)
    if "\\" in key:
        key = key.replace("\\.", "/").replace("\\/", "/")
    return key.replace(".", "/")


class ByLooseKey(Generic[_Value]):
    """Values by their path, also found under another spelling of it if only one path has that spelling.

    >>> found = ByLooseKey([(("params", "w"), 1), (("a.b",), 2), (("a", "b"), 3)])
    >>> found.get(("params.w",)), found.get(("a.b",)), found.get(("a/b",))
    (1, 2, None)
    """

    def __init__(self, items: Iterable[tuple[tuple[str, ...], _Value]]) -> None:
        self._exact = dict(items)
        self._loose: dict[str, list[_Value]] | None = None  # made when a path is first found under no exact spelling

    def get(self, path: tuple[str, ...]) -> _Value | None:
        if path in self._exact:
            return self._exact[path]
        if self._loose is None:
            self._loose = {}
            for known, value in self._exact.items():
                self._loose.setdefault(loose_key(known), []).append(value)
        found = self._loose.get(loose_key(path), ())
        return found[0] if len(found) == 1 else None


class KeyTable(dict[str, _Value]):
    """A dict by `/`-joined key that also understands keys joined with dots, where only one key can be meant.

    >>> table = KeyTable({"params/w": 1, "step": 2})
    >>> table["params.w"], "params.w" in table, table.get("params.x"), list(table)
    (1, True, None, ['params/w', 'step'])
    """

    _loose: dict[str, list[str]] | None = None

    def __missing__(self, key: object) -> _Value:
        found = self._meant(key)
        if found is None:
            raise KeyError(key)
        return self[found]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._meant(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        found = key if super().__contains__(key) else self._meant(key)
        return default if found is None else self[found]

    def _meant(self, key: object) -> str | None:
        if not isinstance(key, str):
            return None
        if self._loose is None:
            self._loose = {}
            for name in self:
                self._loose.setdefault(loose_key((name,)), []).append(name)
        found = self._loose.get(loose_key((key,)), [])
        return found[0] if len(found) == 1 else None
