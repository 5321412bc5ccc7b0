"""The path objects of eFormer's API."""

from dataclasses import dataclass

from shardkeep.stores.location import Location, any_path_text, anywhere, exists


@dataclass(frozen=True, repr=False)
class LoadPath:
    """A path or URL, as it was given, with `/`, `str()` and `exists()`."""

    text: str

    def __truediv__(self, name: object) -> "LoadPath":
        # Numbers are fine as names: directories of steps are called 100, 200, ...
        below = str(name) if isinstance(name, int) else any_path_text(name, "LoadPath / name")
        return LoadPath(str(Location(self.text) / below.lstrip("/")))

    def __str__(self) -> str:
        return self.text

    __fspath__ = __str__

    def __repr__(self) -> str:
        return f"LoadPath({self.text!r})"

    def exists(self) -> bool:
        """Whether there is a file or directory at the path."""
        return exists(anywhere(self.text))
