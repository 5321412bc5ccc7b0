"""The path objects of eFormer's API."""

from shardkeep.stores.location import any_path_text, anywhere, exists


class LoadPath:
    """A path or URL with `/`, `str()` and `exists()`."""

    def __init__(self, text: object) -> None:
        self._text = any_path_text(text, "LoadPath(text)")

    def __truediv__(self, name: object) -> "LoadPath":
        # Numbers are fine as names: directories of steps are called 100, 200, ...
        below = str(name) if isinstance(name, int) else any_path_text(name, "LoadPath / name")
        return LoadPath(f"{self._text.rstrip('/')}/{below.lstrip('/')}")

    def __str__(self) -> str:
        return self._text

    def __fspath__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"LoadPath({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoadPath) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def exists(self) -> bool:
        """Whether there is a file or directory at the path."""
        return exists(anywhere(self._text))
