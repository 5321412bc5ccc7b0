"""The entry point: parse the command line, run one command, turn errors into messages and exit codes.

A command's module is imported only when that command runs: importing the library takes a moment, and for `convert`,
which needs JAX, a second. The import happens where Ctrl-C is caught.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from shardkeep.cli.parser import BROKEN_PIPE, ERROR, INTERRUPTED, make_parser
from shardkeep.config import DEBUG, read
from shardkeep.errors import ShardkeepError

if TYPE_CHECKING:
    from shardkeep.cli.output import Output
    from shardkeep.cli.selecting import Selection


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `shardkeep --help`).

    Args:
        argv: The words of the command line after the program's name; those of this process if None.
    """
    parser = make_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return ERROR
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as ended:  # help, the version or a wrong command line, which argparse has printed
        return int(ended.code or 0)
    try:
        return _run(arguments)
    except BrokenPipeError:
        return _stop_writing()
    except KeyboardInterrupt:
        sys.stderr.write("\nshardkeep: interrupted\n")
        return INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    from shardkeep.cli.output import Output
    from shardkeep.converting.usage import UsageError

    output = Output(arguments.json)
    debug = arguments.debug or read(DEBUG)
    try:
        code = _COMMANDS[arguments.command](arguments, output)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        raise
    except (ShardkeepError, UsageError, OSError) as error:
        if debug:
            traceback.print_exc()
        return _report(error, output)
    except Exception as error:  # noqa: BLE001  (a bug: shown in full, and not with 1, which means "findings")
        traceback.print_exc()
        return _report(error, output)


def _report(error: Exception, output: "Output") -> int:
    from shardkeep.cli.output import message_of

    message = message_of(error)
    if output.as_json:
        output.document({"error": {"type": type(error).__name__, "message": message}})
    sys.stderr.write(f"shardkeep: {message}\n")
    return ERROR


def _stop_writing() -> int:
    """The reader of stdout is gone: send the interpreter's last flush nowhere, so that it does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):  # not a real file, so there is nothing to flush
        pass
    finally:
        os.close(nowhere)
    return BROKEN_PIPE


def _selection(arguments: argparse.Namespace) -> "Selection":
    from shardkeep.cli.selecting import Selection

    return Selection(arguments.metric, arguments.mode)


def _ls(arguments: argparse.Namespace, output: "Output") -> int:
    from shardkeep.cli.listing import ls

    return ls(arguments.path, output)


def _inspect(arguments: argparse.Namespace, output: "Output") -> int:
    from shardkeep.cli.inspecting import inspect

    path = _selection(arguments).path_of(arguments.path)
    return inspect(path, output, arguments.prefix, arguments.include, arguments.depth, arguments.sort)


def _verify(arguments: argparse.Namespace, output: "Output") -> int:
    from shardkeep.cli.checking import verify

    selection = _selection(arguments)
    with ExitStack() as held:
        paths = [held.enter_context(selection.held(path)) for path in arguments.paths]
        return verify(paths, output, arguments.prefix)


def _diff(arguments: argparse.Namespace, output: "Output") -> int:
    from shardkeep.cli.comparing import diff

    prefixes = (arguments.prefix, arguments.prefix if arguments.prefix_b is None else arguments.prefix_b)
    selection = _selection(arguments)
    with selection.held(arguments.a) as a, selection.held(arguments.b) as b:
        return diff(a, b, output, prefixes, arguments.include, arguments.values)


def _convert(arguments: argparse.Namespace, output: "Output") -> int:
    from shardkeep.cli.converting import run
    from shardkeep.converting.convert import Conversion

    with _selection(arguments).held(arguments.source) as source:
        wanted = Conversion(
            source=source,
            destination=arguments.destination,
            format="safetensors" if arguments.format == "safetensors" else "zarr",
            compression=arguments.compression,
            dtype=arguments.dtype,
            include=arguments.include,
            prefix=arguments.prefix,
            subtree=arguments.subtree,
            rename=arguments.rename,
            remap=arguments.remap,
            max_shard_size=arguments.max_shard_size,
            overwrite=arguments.overwrite,
        )
        return run(wanted, output)


def _stats(arguments: argparse.Namespace, output: "Output") -> int:
    from shardkeep.cli.measuring import stats

    with _selection(arguments).held(arguments.path) as path:
        return stats(path, output, arguments.prefix, arguments.include, arguments.fail_on)


def _clean(arguments: argparse.Namespace, output: "Output") -> int:
    from shardkeep.cli.cleaning import clean

    return clean(arguments.path, output, arguments.yes, arguments.dry_run)


def _pin(arguments: argparse.Namespace, output: "Output") -> int:
    from shardkeep.cli.runs import pin

    return pin(arguments.step, _selection(arguments), output, pinned=arguments.command == "pin")


def _save_now(arguments: argparse.Namespace, output: "Output") -> int:
    from shardkeep.cli.runs import save_now

    return save_now(arguments.path, output)


def _completion(arguments: argparse.Namespace, output: "Output") -> int:
    from shardkeep.cli.completion import completion_script

    output.line(completion_script(arguments.shell).rstrip())
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace, "Output"], int]] = {
    "ls": _ls,
    "inspect": _inspect,
    "verify": _verify,
    "diff": _diff,
    "convert": _convert,
    "stats": _stats,
    "clean": _clean,
    "pin": _pin,
    "unpin": _pin,
    "save-now": _save_now,
    "completion": _completion,
}
