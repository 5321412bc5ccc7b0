"""`shardkeep convert`: write any checkpoint in another format, and say what became of each tree."""

from collections.abc import Sequence

from shardkeep.cli.output import Output, bar, counted, human, plain, shows_progress
from shardkeep.converting.convert import Conversion, Converted, convert
from shardkeep.model.tree import name_leaf, show_key


def run(wanted: Conversion, output: Output) -> int:
    """Convert, and show each tree as soon as it is committed."""
    done: list[Converted] = []
    for one in convert(wanted, bar, shows_progress()):
        done.append(one)
        if not output.as_json:
            _show(one, wanted, output)
    if output.as_json:
        output.document(_document(wanted, done))
    return 0


def _show(done: Converted, wanted: Conversion, output: Output) -> None:
    prefix = f" [{plain(done.prefix)}]" if done.prefix else ""
    report = done.report
    output.line(
        f"{plain(wanted.source)}{prefix} → {output.paint(plain(report.path), 'bold')}: "
        f"{counted(done.leaves, 'leaf', 'leaves')}, {human(report.nbytes)} in {counted(report.files, 'file')}, "
        f"{done.seconds:.2f} s"
    )
    if wanted.dtype is not None:
        output.line(f"  {counted(done.cast, 'array')} cast to {wanted.dtype}")
    for path, count in done.lost.items():
        text = f"  {plain(name_leaf(path))}: {counted(count, 'value')} became infinite or NaN as {wanted.dtype}"
        output.line(output.paint(text, "yellow"))


def _document(wanted: Conversion, done: Sequence[Converted]) -> dict[str, object]:
    return {
        "source": wanted.source,
        "destination": wanted.destination,
        "format": wanted.format,
        "compression": wanted.compression,
        "trees": [
            {
                "prefix": one.prefix,
                "path": one.report.path,
                "leaves": one.leaves,
                "cast": one.cast,
                "lost_to_cast": {show_key(path): count for path, count in one.lost.items()},
                "stored_bytes": one.report.nbytes,
                "files": one.report.files,
                "scratch_bytes": one.scratch,
                "seconds": one.seconds,
            }
            for one in done
        ],
    }
