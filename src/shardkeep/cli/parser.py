"""What can be typed: the commands, their options and their help. Imports nothing of the library, so help is instant."""

import argparse
from typing import Any

from shardkeep._version import __version__

ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141

_CODES = """exit codes:
  0    all is well (diff: equal; clean: nothing is left)
  1    findings (verify: damage; diff: differences; clean: left-overs remain)
  2    an error, or a wrong command line
  130  interrupted with Ctrl-C
  141  the reader of the output went away (… | head)

environment:
  NO_COLOR         any value: no colours on the terminal
  SHARDKEEP_DEBUG  any value: show where an error came from, like --debug"""

_ABOUT = """Look at, check, compare, convert and tidy checkpoints.

PATH is a checkpoint directory, a .safetensors file or index, a Hugging Face directory or an
eFormer checkpoint, on disk or in a bucket (gs://, s3://). Nothing needs an accelerator, and nothing
in a file is executed."""


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="shardkeep", description=_ABOUT, epilog=_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"shardkeep {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (_add_ls, _add_inspect, _add_verify, _add_diff, _add_convert, _add_stats, _add_clean):
        add(commands)
    return parser


def _command(commands: Any, name: str, summary: str, about: str, example: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{about}",
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    command.add_argument("--debug", action="store_true", help="show where an error came from")
    return command


def _add_choice(command: argparse.ArgumentParser, *, match: bool = True) -> None:
    command.add_argument("--prefix", metavar="P", help="only the tree of this prefix")
    if match:
        command.add_argument("--match", metavar="REGEX", help="only leaves whose key, joined with /, it is found in")


def _add_ls(commands: Any) -> None:
    command = _command(
        commands,
        "ls",
        "list the checkpoints at and below a path",
        "Shows age, size on disk, format, prefixes and state: complete, saving (a save is at work),\n"
        "unfinished (a save died), damaged, newer (written by a later version), unindexed (zarr arrays\n"
        "without an index). Sorted by name, step_9 before step_10.",
        "  shardkeep ls runs/exp1",
    )
    command.add_argument("path", metavar="PATH", nargs="?", default=".", help="where to look (default: here)")


def _add_inspect(commands: Any) -> None:
    command = _command(
        commands,
        "inspect",
        "show what a checkpoint holds",
        "The tree with shapes, dtypes, bytes, pieces, shardings and metadata. No array is read.",
        "  shardkeep inspect runs/exp1/step_100 --depth 2 --sort size",
    )
    command.add_argument("path", metavar="PATH")
    _add_choice(command)
    command.add_argument("--depth", metavar="N", type=_positive, help="fold what lies deeper into one line each")
    command.add_argument("--sort", choices=("name", "size"), help="order of siblings (default: as saved)")


def _add_verify(commands: Any) -> None:
    command = _command(
        commands,
        "verify",
        "check every stored byte against its digest",
        "Each bad leaf and file is named. Arrays of other programs carry no digests: of these it is\n"
        "checked that all files are there and have their size. Of several paths all are checked, also\n"
        "after one that is bad or cannot be opened; the exit code is that of the worst.",
        "  shardkeep verify runs/exp1/step_*",
    )
    command.add_argument("paths", metavar="PATH", nargs="+")
    _add_choice(command, match=False)


def _add_diff(commands: Any) -> None:
    command = _command(
        commands,
        "diff",
        "compare two checkpoints",
        "Leaves that only one of them has, shapes, dtypes, and values: the largest absolute difference,\n"
        "how many elements changed, NaNs. Memory stays bounded. Arrays stored in the same parts with the\n"
        "same digests are equal and are not read again, unless --values asks for it; with --no-values\n"
        "no array is read at all, and what digests cannot tell is reported as not compared.",
        "  shardkeep diff runs/exp1/step_100 runs/exp1/step_200 --match 'layers/0/.*'",
    )
    command.add_argument("a", metavar="A")
    command.add_argument("b", metavar="B")
    command.add_argument("--prefix", metavar="P", help="only the tree of this prefix, of both")
    command.add_argument("--prefix-b", metavar="P", help="compare it with this prefix of B")
    command.add_argument("--match", metavar="REGEX", help="only leaves whose key, joined with /, it is found in")
    command.add_argument("--values", action=argparse.BooleanOptionalAction, help="read all arrays, or none")


def _add_convert(commands: Any) -> None:
    command = _command(
        commands,
        "convert",
        "write a checkpoint in another format",
        "Structure, plain values and metadata are kept. DST ending in .safetensors gives plain files\n"
        "with whole arrays under Hugging Face names, any other DST a checkpoint directory. Memory stays\n"
        "bounded: arrays are mapped from SRC or, where they must be decoded, cast or put together, made\n"
        "in an unnamed file beside DST. Several prefixes are written one after another, each whole.\n\n"
        "--match, --subtree and --rename are applied in this order. Keys are joined with /, as in 'params/dense'.",
        "  shardkeep convert runs/exp1/step_100 export/model.safetensors --subtree params --dtype bfloat16",
    )
    command.add_argument("source", metavar="SRC")
    command.add_argument("destination", metavar="DST")
    command.add_argument("--format", choices=("safetensors", "tensorstore"), default="safetensors")
    command.add_argument("--compression", choices=("zstd",), help="with --format tensorstore")
    command.add_argument("--dtype", metavar="D", help="cast arrays of its own kind (floats with bfloat16, …)")
    _add_choice(command)
    command.add_argument("--subtree", metavar="KEY", help="only what lies below this key, named from there")
    command.add_argument(
        "--rename",
        metavar="OLD=NEW",
        action="append",
        default=[],
        help="replace what a regular expression finds in keys; may be repeated; structure becomes nested dicts",
    )
    command.add_argument("--max-shard-size", metavar="S", help="of .safetensors files, for example 5GB (the default)")
    command.add_argument("--overwrite", action="store_true", help="replace what is at DST")


def _add_stats(commands: Any) -> None:
    command = _command(
        commands,
        "stats",
        "show the numbers in each array",
        "Least, greatest, mean and standard deviation of the finite values (of complex numbers: of their\n"
        "magnitudes), counts of NaN, Inf and zero. Flags arrays that are all zero, constant, hold NaN,\n"
        "Inf, huge values (1e8, or half of what the dtype holds) or more than 1 % denormals.",
        "  shardkeep stats runs/exp1/step_100 --match kernel",
    )
    command.add_argument("path", metavar="PATH")
    _add_choice(command)


def _add_clean(commands: Any) -> None:
    command = _command(
        commands,
        "clean",
        "remove what dead saves left behind",
        "Looks at and below PATH for files that saves which died had recorded and no checkpoint needs.\n"
        "Files of running saves, of checkpoints, and files nobody recorded are never touched.",
        "  shardkeep clean runs/exp1 --dry-run",
    )
    command.add_argument("path", metavar="PATH")
    command.add_argument("--yes", action="store_true", help="do not ask")
    command.add_argument("--dry-run", action="store_true", help="only tell what would go")


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number, at least 1, not {text!r}")
    return int(text)
