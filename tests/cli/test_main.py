"""The command as a whole: help, exit codes, errors, pipes, terminals, and what it must not bring in."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

import shardkeep
from cli.commands import Result, Run, environment, leave_dead_save, run_command
from shardkeep._version import __version__
from shardkeep.cli import listing
from shardkeep.cli.main import main

SOURCE = Path(__file__).parents[2] / "src" / "shardkeep"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tree = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "step": 7, "key": jax.random.key(0)}
    shardkeep.save(tmp_path / "step_7", tree)
    return tmp_path / "step_7"


@pytest.mark.parametrize("name", ["inspect", "verify", "stats", "clean"])
def test_a_path_with_nothing_there_is_an_error_in_one_line(run: Run, tmp_path: Path, name: str) -> None:
    result = run(name, tmp_path / "nothing")
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("shardkeep: ")
    assert result.err.count("\n") == 1
    assert "nothing" in result.err


def test_debug_shows_where_an_error_came_from(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in run("inspect", tmp_path / "nothing", "--debug").err
    assert "Traceback" not in run("inspect", tmp_path / "nothing").err
    monkeypatch.setenv("SHARDKEEP_DEBUG", "1")
    assert "Traceback" in run("inspect", tmp_path / "nothing").err


def test_with_json_an_error_is_a_document_too(run: Run, tmp_path: Path) -> None:
    result = run("inspect", tmp_path / "nothing", "--json")
    assert result.code == 2
    assert result.document["error"]["type"] == "CheckpointNotFoundError"
    assert result.document["error"]["message"] in result.err


def test_options_are_named_as_options_in_messages(run: Run, checkpoint: Path) -> None:
    result = run("convert", checkpoint, checkpoint)
    assert result.code == 2
    assert "--overwrite" in result.err
    assert "overwrite=True" not in result.err


def test_an_interrupt_ends_with_130(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(listing, "ls", interrupt)
    result = run("ls", checkpoint)
    assert result.code == 130
    assert "interrupted" in result.err


def test_an_interrupt_while_the_library_is_imported_ends_with_130_too(checkpoint: Path) -> None:
    code = (
        "import sys; from shardkeep.cli.main import main\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'numpy': raise KeyboardInterrupt\n"
        "assert 'numpy' not in sys.modules\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        f"sys.exit(main(['ls', {str(checkpoint)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (130, "\nshardkeep: interrupted\n")


def test_without_a_command_the_commands_are_shown(run: Run) -> None:
    result = run()
    assert result.code == 2
    assert "list the checkpoints" in result.err


def test_a_mistake_of_ours_is_shown_in_full_and_is_no_finding(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("oh")

    monkeypatch.setattr(listing, "ls", fail)
    result = run("ls", checkpoint)
    assert result.code == 2
    assert "Traceback" in result.err


def test_what_a_file_says_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"a\x1b[2Jb": np.ones(2), "\ud800": 1}, metadata={"note": "\x1b[31m"})
    for words in (["inspect"], ["stats"], ["verify"]):
        assert "\x1b" not in run(*words, tmp_path / "c").out
    assert "a\\x1b[2Jb" in run("inspect", tmp_path / "c").out
    assert run.document("inspect", tmp_path / "c")["trees"][0]["leaves"][0]["key"] == "a\x1b[2Jb"


def test_the_module_and_the_version(checkpoint: Path) -> None:
    assert run_command(["--version"]) == Result(0, f"shardkeep {__version__}\n", "")
    listed = run_command(["ls", checkpoint.parent, "--json"])
    assert listed.code == 0, listed.err
    assert [found["name"] for found in listed.document["checkpoints"]] == ["step_7"]


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {f"leaf_{i:05d}_{'x' * 40}": i for i in range(5000)})
    with subprocess.Popen(
        [sys.executable, "-m", "shardkeep", "inspect", str(tmp_path / "c")],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(100)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_no_command_starts_a_device(checkpoint: Path, tmp_path: Path) -> None:
    """An accelerator that someone else is training on must not be touched."""
    code = f"""
import json, sys
from shardkeep.cli.main import main
from jax._src import xla_bridge
at, to = {str(checkpoint)!r}, {str(tmp_path)!r}
calls = [["ls", at], ["inspect", at], ["verify", at], ["stats", at], ["diff", at, at, "--values"], ["clean", at],
         ["convert", at, to + "/a", "--format", "zarr"], ["convert", at, to + "/b.safetensors"],
         ["convert", to + "/a", to + "/c", "--dtype", "bfloat16"], ["stats", to + "/a"]]
codes = [main(call) for call in calls]
print(json.dumps([codes, len(xla_bridge._backends)]), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert json.loads(done.stderr.splitlines()[-1]) == [[0] * 10, 0], done.stderr


def _imports_jax(code: str) -> bool:
    check = f"import sys\n{code}\nprint('jax' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=100, check=False)
    return {"True": True, "False": False}[done.stderr.strip().splitlines()[-1]]


def test_help_needs_nothing_of_the_library() -> None:
    """The package's own start-up is left out here, so that this holds whatever that brings in."""
    bare = (
        f"import types; p = types.ModuleType('shardkeep'); p.__path__ = [{str(SOURCE)!r}]; sys.modules['shardkeep'] = p"
    )
    call = "from shardkeep.cli.main import main; main(['--help']); main(['diff', '--help']); main(['--version'])"
    assert not _imports_jax(f"{bare}\n{call}")


def test_help_comes_without_jax() -> None:
    if _imports_jax("import shardkeep"):
        pytest.skip("`import shardkeep` brings JAX, before the command has a say")
    assert not _imports_jax("from shardkeep.cli.main import main; main(['--help'])")


# Bars are shown after half a second: here from the start.
_AT_ONCE = """
import sys
from shardkeep.runtime import progress
from shardkeep.cli.main import main
progress.DELAY = 0
sys.exit(main())
"""


def on_terminal(words: Sequence[object], answer: str = "", at_once: bool = False, **more: str) -> tuple[int, str]:
    """What a person sees who runs the command, and how it ends."""
    terminal, theirs = pty.openpty()
    start = ["-c", _AT_ONCE] if at_once else ["-m", "shardkeep"]
    with subprocess.Popen(
        [sys.executable, *start, *map(str, words)],
        env={k: v for k, v in environment(TERM="xterm", **more).items() if k != "NO_COLOR" or k in more},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        if answer:
            os.write(terminal, answer.encode())
        seen = b""
        while True:
            try:
                some = os.read(terminal, 65536)
            except OSError:  # the other side is closed
                break
            if not some:
                break
            seen += some
        os.close(terminal)
        return process.wait(60), seen.decode()


def test_a_terminal_gets_colours_and_progress(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"w": np.zeros(1 << 20)})
    code, seen = on_terminal(["verify", tmp_path / "c"], at_once=True)
    assert code == 0
    assert "\033[32mok\033[0m" in seen
    assert "\rchecking" in seen
    assert "█" in seen
    assert re.search(r" 100% 8\.4 MB in .* s \(.* .B/s\)", seen)
    assert " left" not in seen.rpartition("\rchecking")[2]


def test_no_color_and_pipes_get_plain_text(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"w": np.zeros(1 << 10)})
    assert "\033" not in on_terminal(["ls", tmp_path], NO_COLOR="1")[1]
    assert "\033" in on_terminal(["ls", tmp_path])[1]
    piped = run_command(["verify", tmp_path / "c"])
    assert "\033" not in piped.out
    assert piped.err == ""


def test_clean_asks_on_a_terminal(tmp_path: Path) -> None:
    for answer, code in (("n\n", 1), ("y\n", 0)):
        left = leave_dead_save(tmp_path / "c")
        ended, seen = on_terminal(["clean", tmp_path / "c"], answer)
        assert "Remove 1 file (1.0 kB)? [y/N]" in seen
        assert ended == code
        assert left.exists() == (code == 1)


def test_main_takes_its_words_from_the_command_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shardkeep", "inspect", str(checkpoint)])
    assert main() == 0
    assert "float32[3,4]" in capsys.readouterr().out
