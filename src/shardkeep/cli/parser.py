"""The commands, their options and their help. Imports nothing else of the library, so that help comes at once."""

import argparse
from typing import TypeAlias

from shardkeep._version import __version__

# Exit codes; the last two are 128 and the number of the signal.
FINDINGS, ERROR, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
FLAGS = ("nan", "inf", "all_zero", "constant", "huge", "denormal")  # of `stats`

_CODES = """exit codes:
  0    success (diff: no differences; clean: nothing left to remove)
  1    findings (verify: damage; diff: differences; stats: a flag listed in --fail-on;
       clean: files remain)
  2    an error, or a wrong command line
  130  interrupted with Ctrl-C
  141  the output was closed before everything was written (… | head)

environment:
  NO_COLOR         if set, print no colours
  SHARDKEEP_DEBUG  if set, print the traceback of errors, like --debug"""

_ABOUT = """List, inspect, verify, compare, convert and clean up checkpoints.

PATH is a checkpoint directory, a .safetensors file or index, a Hugging Face directory or a
checkpoint of another library (Orbax, PyTorch, Flax, Keras, NumPy, eFormer), on disk or in a
bucket (gs://, s3://). Commands that read a checkpoint also accept steps of a run: RUN@latest,
RUN@best and RUN@1000. No command uses an accelerator or executes code from a checkpoint."""
_INCLUDE = "only leaves whose key (names joined with /) matches this regular expression (re.search)"


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="shardkeep", description=_ABOUT, epilog=_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"shardkeep {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (_add_ls, _add_inspect, _add_verify, _add_diff, _add_convert, _add_stats, _add_clean):
        add(commands)
    _add_pin(commands)
    _add_save_now(commands)
    _add_completion(commands)
    return parser


_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # pyright: ignore[reportPrivateUsage]  (it has no public name)


def _command(commands: _Commands, name: str, summary: str, about: str, example: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{about}",
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    command.add_argument("--debug", action="store_true", help="print the traceback of errors")
    return command


def _add_choice(command: argparse.ArgumentParser, *, include: bool = True) -> None:
    command.add_argument("--prefix", metavar="P", help="only the tree with this prefix")
    if include:
        command.add_argument("--include", metavar="REGEX", help=_INCLUDE)


def _add_selection(command: argparse.ArgumentParser) -> None:
    command.add_argument("--metric", metavar="M", help="the metric for RUN@best (default: that of the run's Keep)")
    command.add_argument("--mode", choices=("min", "max"), help="whether smaller or larger metrics are better")


def _add_ls(commands: _Commands) -> None:
    command = _command(
        commands,
        "ls",
        "list the checkpoints at and below a path",
        "Shows age, size on disk, format, state and prefixes. States: complete; saving and deleting\n"
        "(still running); unfinished (a save died before it committed); damaged (files missing or truncated,\n"
        "or the manifest corrupted); newer (written by a later version of shardkeep); unindexed (zarr\n"
        "arrays without an index); unreadable (permission denied, for example). File contents are not\n"
        "read: see verify. Sorted by name, step_9 before step_10.\n\n"
        "For a run, it lists the steps with their metrics and why each is kept. Steps have two more states:\n"
        "abandoned (the run went back to an earlier step) and deleting. In a bucket, the sizes of a\n"
        "step's files are not compared: it is shown as damaged only if a resume found damage.",
        "  shardkeep ls runs/exp1",
    )
    command.add_argument(
        "path", metavar="PATH", nargs="?", default=".", help="the directory to list (default: the current directory)"
    )


def _add_inspect(commands: _Commands) -> None:
    command = _command(
        commands,
        "inspect",
        "show what a checkpoint contains",
        "Prints the tree with shapes, dtypes, sizes, pieces, shardings and metadata. Reads no array.",
        "  shardkeep inspect runs/exp1/step_100 --depth 2 --sort size",
    )
    command.add_argument("path", metavar="PATH")
    _add_choice(command)
    command.add_argument(
        "--depth", metavar="N", type=_positive, help="show N levels, and one line for each deeper subtree"
    )
    command.add_argument("--sort", choices=("name", "size"), help="order of siblings (default: as in the tree)")
    _add_selection(command)


def _add_verify(commands: _Commands) -> None:
    command = _command(
        commands,
        "verify",
        "check every stored byte against its digest",
        "Names every damaged leaf and file. Arrays written by other programs have no digests: for these\n"
        "it checks that every file is present and has the right size. Checks all checkpoints that ls lists\n"
        "at and below each PATH, even after one that is damaged or cannot be opened. The exit code is\n"
        "that of the worst result. A running save is not a finding.",
        "  shardkeep verify runs/exp1",
    )
    command.add_argument("paths", metavar="PATH", nargs="+", help="a checkpoint, or a directory of checkpoints")
    _add_choice(command, include=False)
    _add_selection(command)


def _add_diff(commands: _Commands) -> None:
    command = _command(
        commands,
        "diff",
        "compare two checkpoints",
        "Reports leaves that are in only one of them, and differences in shape, dtype and values: the\n"
        "maximum absolute difference, the number of elements that changed, and NaNs. Memory use is\n"
        "bounded. Arrays stored in the same pieces with the same digests are equal and are not read,\n"
        "unless you pass --values. With --no-values no array is read, and arrays whose digests cannot\n"
        "be compared are reported as not compared.",
        "  shardkeep diff runs/exp1/step_100 runs/exp1/step_200 --include 'layers/0/.*'",
    )
    command.add_argument("a", metavar="A")
    command.add_argument("b", metavar="B")
    command.add_argument("--prefix", metavar="P", help="only the tree with this prefix, in both")
    command.add_argument("--prefix-b", metavar="P", help="the prefix in B, if it differs from --prefix")
    command.add_argument("--include", metavar="REGEX", help=_INCLUDE)
    command.add_argument(
        "--values",
        action=argparse.BooleanOptionalAction,
        help="read all arrays, or none (default: those whose digests do not show that they are equal)",
    )
    _add_selection(command)


def _add_convert(commands: _Commands) -> None:
    command = _command(
        commands,
        "convert",
        "write a checkpoint in another format",
        "Structure, plain values and metadata are kept. If DST ends in .safetensors, it becomes plain\n"
        "safetensors files with unsharded arrays, named as Hugging Face does; otherwise a checkpoint\n"
        "directory. Memory use is bounded: arrays are memory-mapped from SRC or, if they must be\n"
        "decompressed, cast or assembled, prepared in an unnamed file next to DST. If SRC has several\n"
        "prefixes, each is committed separately.\n\n"
        "--include, --subtree, --rename and --remap are applied in this order. The names in a key are joined\n"
        "with /, as in 'params/dense/kernel'.",
        "  shardkeep convert runs/exp1/step_100 export/model.safetensors --subtree params --dtype bfloat16",
    )
    command.add_argument("source", metavar="SRC")
    command.add_argument("destination", metavar="DST")
    command.add_argument(
        "--format",
        choices=("safetensors", "zarr", "tensorstore"),
        default="safetensors",
        help="format of a checkpoint directory (default: safetensors; tensorstore is an alias of zarr)",
    )
    command.add_argument("--compression", choices=("zstd",), help="compress arrays; needs --format zarr")
    command.add_argument(
        "--dtype", metavar="D", help="cast arrays of the same kind: bfloat16 casts floats, int8 integers"
    )
    _add_choice(command)
    command.add_argument("--subtree", metavar="KEY", help="only the leaves below this key, named relative to it")
    command.add_argument(
        "--rename",
        metavar="OLD=NEW",
        action="append",
        default=[],
        help="replace every match of the regular expression OLD in each key (re.sub); the result is a tree of nested "
        "dicts; may be repeated",
    )
    command.add_argument(
        "--remap",
        metavar="FILE",
        help="apply the rules in this JSON file, as shardkeep.remap.to_json writes them: stack, split, transpose, ...",
    )
    command.add_argument("--max-shard-size", metavar="S", help="maximum size of a .safetensors file (default: 5GB)")
    command.add_argument("--overwrite", action="store_true", help="replace the checkpoint at DST")
    _add_selection(command)


def _add_stats(commands: _Commands) -> None:
    command = _command(
        commands,
        "stats",
        "summarize the values of each array",
        "Prints min, max, mean and standard deviation of the finite values (for complex numbers, of their\n"
        "magnitudes), and the number of NaNs, infinities and zeros. Flags arrays that look wrong:\n"
        '  nan       it contains NaN (shown as "all nan" if it contains nothing else)\n'
        "  inf       it contains infinities\n"
        "  all_zero  all its values are zero\n"
        "  constant  all its values are equal, and not zero\n"
        "  huge      a magnitude of 1e8 or more, or of half the maximum of the dtype\n"
        "  denormal  more than 1 % of its values are denormal",
        "  shardkeep stats runs/exp1/step_100 --include kernel --fail-on nan,inf",
    )
    command.add_argument("path", metavar="PATH")
    _add_choice(command)
    command.add_argument(
        "--fail-on",
        metavar="FLAGS",
        type=_flags,
        default=(),
        help=f"exit with 1 if a leaf has one of these flags, separated by commas: {', '.join(FLAGS)}, or any",
    )
    _add_selection(command)


def _add_clean(commands: _Commands) -> None:
    command = _command(
        commands,
        "clean",
        "remove files that interrupted saves left behind",
        "Searches PATH and below for files left behind by saves that died. Never removes files of\n"
        "checkpoints or of running saves, or files that shardkeep did not write.",
        "  shardkeep clean runs/exp1 --dry-run",
    )
    command.add_argument("path", metavar="PATH")
    command.add_argument("--yes", action="store_true", help="remove without asking")
    command.add_argument("--dry-run", action="store_true", help="only show what would be removed")


def _add_pin(commands: _Commands) -> None:
    for name, summary, about in (
        (
            "pin",
            "protect a step of a run from deletion",
            "The step is kept until it is unpinned. The run may be training.",
        ),
        ("unpin", "remove the pin of a step", "The next save deletes it if no rule keeps it."),
    ):
        command = _command(commands, name, summary, about, f"  shardkeep {name} runs/exp1@1000")
        command.add_argument("step", metavar="RUN@STEP", help="RUN@1000, RUN@latest or RUN@best")
        _add_selection(command)


def _add_save_now(commands: _Commands) -> None:
    command = _command(
        commands,
        "save-now",
        "request a save from the program that writes a run",
        "Writes a request into the run's directory. Process 0 of the program checks for requests every\n"
        "10 seconds, and all processes save at one of their next steps. Returns at once.",
        "  shardkeep save-now runs/exp1",
    )
    command.add_argument("path", metavar="RUN")


def _add_completion(commands: _Commands) -> None:
    name, summary = "completion", "print a shell completion script"
    command = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n"
        "Completes commands, options, their values and paths, and latest and best after RUN@.",
        epilog="examples:\n"
        '  eval "$(shardkeep completion bash)"    # in ~/.bashrc\n'
        '  eval "$(shardkeep completion zsh)"     # in ~/.zshrc, after compinit',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("shell", metavar="SHELL", choices=("bash", "zsh"), help="bash or zsh")
    command.set_defaults(json=False, debug=False)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return int(text)


def _flags(text: str) -> tuple[str, ...]:
    """The flags in a list such as "nan,inf"; `any` stands for all of them."""
    names = [name.strip().lower().replace("-", "_").replace(" ", "_") for name in text.split(",")]
    unknown = [name for name in names if name not in (*FLAGS, "any")]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown flag {unknown[0]!r}; choose from {', '.join(FLAGS)}, any")
    return FLAGS if "any" in names else tuple(dict.fromkeys(names))
