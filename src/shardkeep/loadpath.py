"""Paths as the documented API hands them around."""

from shardkeep.stores.places import anywhere, exists


class LoadPath:
    """A path or URL that can be joined with `/`, shown, and asked whether something is there."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __truediv__(self, name: object) -> "LoadPath":
        return LoadPath(f"{self._text.rstrip('/')}/{str(name).lstrip('/')}")

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"LoadPath({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoadPath) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def exists(self) -> bool:
        """Whether a file or directory is there."""
        return exists(anywhere(self._text))
