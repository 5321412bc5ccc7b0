"""`shardkeep completion`: real shells complete what the parser accepts, and paths."""

import os
import pty
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.commands import Run
from shardkeep.cli import completion
from shardkeep.cli.completion import completion_script
from shardkeep.cli.parser import make_parser

SHELLS = {
    "bash": ["bash", "--noprofile", "--norc", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
# Before the script is read: a prompt to wait for, and a command that writes down its arguments.
SET_UP = {
    "bash": "bind 'set bell-style none'",
    "zsh": "unsetopt prompt_cr prompt_sp beep; autoload -Uz compinit; compinit -u -D",
}
PROMPT = b"READY>"


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    if not shutil.which(request.param):
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a run and some files, which is the working directory."""
    (tmp_path / "runs" / "exp1" / "step_100").mkdir(parents=True)
    (tmp_path / "my exports").mkdir()
    (tmp_path / "my exports" / "model.safetensors").touch()
    (tmp_path / "rules.json").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(shell: str, *lines: str) -> list[list[str]]:
    """The arguments that `shardkeep` gets when each line is typed at the prompt of a shell; tabs complete."""
    Path("completion").write_text(completion_script(shell))
    record = "shardkeep() { printf '%s\\0' \"$@\" >> typed; printf '\\n' >> typed; }"
    Path("setup").write_text(f"{SET_UP[shell]}\n. ./completion\n{record}\nPS1={PROMPT.decode()!r}\n")
    Path("typed").write_text("")
    terminal, slave = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PS1": "", "HISTFILE": "", "INPUTRC": os.devnull}
    process = subprocess.Popen(
        SHELLS[shell], stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment
    )
    os.close(slave)
    try:
        seen = _answer(terminal, ". ./setup", b"")
        for line in lines:
            seen = _answer(terminal, f"shardkeep {line}", seen)
        os.write(terminal, b"exit\n")
        for _ in _said(terminal):  # a shell does not end before its output is read
            pass
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    found = [line.split("\0")[:-1] for line in Path("typed").read_text().split("\n")[:-1]]
    assert len(found) == len(lines)
    return found


def _answer(terminal: int, line: str, seen: bytes) -> bytes:
    """Type a line; return what follows the next prompt."""
    os.write(terminal, line.encode() + b"\n")
    for said in _said(terminal):
        seen += said
        if PROMPT in seen:
            return seen.rpartition(PROMPT)[2]
    raise AssertionError(f"the shell ended: {seen.decode()}")


def _said(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            said = os.read(terminal, 10_000)
        except OSError:  # the other side is closed
            return
        if not said:
            return
        yield said


def test_commands_and_options_are_completed(shell: str, here: Path) -> None:
    assert typed(shell, "insp\t", "save\t", "--vers\t", "convert --max\t", "diff --no\t") == [
        ["inspect"],
        ["save-now"],
        ["--version"],
        ["convert", "--max-shard-size"],
        ["diff", "--no-values"],
    ]


def test_values_with_choices_are_completed_after_a_space_or_an_equals_sign(shell: str, here: Path) -> None:
    assert typed(
        shell, "convert --format z\t", "convert --format=z\t", "inspect --sort s\t", "stats --fail-on nan,den\t",
        "completion z\t",
    ) == [
        ["convert", "--format", "zarr"],
        ["convert", "--format=zarr"],
        ["inspect", "--sort", "size"],
        ["stats", "--fail-on", "nan,denormal"],
        ["completion", "zsh"],
    ]  # fmt: skip


def test_paths_are_completed_as_files(shell: str, here: Path) -> None:
    found = typed(
        shell, "inspect run\tex\tst\t", "verify runs/exp1/step_100 my\tmod\t", "convert --remap rul\t",
        "convert --remap=rul\t",
    )  # fmt: skip
    assert [[word.rstrip("/") for word in words] for words in found] == [  # zsh leaves out the last "/"
        ["inspect", "runs/exp1/step_100"],
        ["verify", "runs/exp1/step_100", "my exports/model.safetensors"],
        ["convert", "--remap", "rules.json"],
        ["convert", "--remap=rules.json"],
    ]


def test_steps_of_runs_are_completed_where_a_command_takes_them(shell: str, here: Path) -> None:
    assert typed(shell, "inspect runs/exp1@l\t", "diff runs/exp1@1 runs/exp1@b\t", "save-now runs/exp1@l\t") == [
        ["inspect", "runs/exp1@latest"],
        ["diff", "runs/exp1@1", "runs/exp1@best"],
        ["save-now", "runs/exp1@l"],
    ]


def offered_by_bash(*words: str) -> list[str]:
    """What the function of the script offers for the last word."""
    program = (
        '. ./completion; COMP_WORDS=(shardkeep "$@"); COMP_CWORD=$#; '
        '_shardkeep shardkeep "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    Path("completion").write_text(completion_script("bash"))
    done = subprocess.run(
        ["bash", "--norc", "-uc", program, "bash", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_is_offered_everything_that_the_parser_accepts(here: Path) -> None:
    (group,) = (action for action in make_parser()._actions if isinstance(action.choices, dict))
    assert offered_by_bash("") == list(group.choices)
    assert offered_by_bash("--") == ["--help", "--version"]
    for name, parser in group.choices.items():
        options = [name for action in parser._actions for name in action.option_strings]
        assert offered_by_bash(name, "-") == options
        for action in parser._actions:
            if action.choices and action.option_strings:
                assert offered_by_bash(name, action.option_strings[0], "") == list(action.choices)


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_files_where_nothing_is_offered(here: Path) -> None:
    for words in (["ls", ""], ["verify", "a", "runs/"], ["convert", "--remap", ""], ["inspect", "--json", ""]):
        assert offered_by_bash(*words) == []
    assert offered_by_bash("inspect", "--prefix", "") == []
    assert offered_by_bash("stats", "--fail-on", "nan,") == [
        f"nan,{flag}" for flag in ("nan", "inf", "all_zero", "constant", "huge", "denormal", "any")
    ]


def test_an_option_that_is_added_to_the_parser_is_in_both_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = make_parser()
    (group,) = (action for action in parser._actions if isinstance(action.choices, dict))
    group.choices["ls"].add_argument("--order", choices=("age", "size"), help="100 %% of [it]: sorted")
    monkeypatch.setattr(completion, "make_parser", lambda: parser)
    assert "'ls --order') words='age size' ;;" in completion_script("bash")
    assert r"--order=[100 % of \[it\]\: sorted]:order:(age size)" in completion_script("zsh")


def test_the_command_prints_the_script(run: Run, shell: str) -> None:
    result = run("completion", shell)
    assert (result.code, result.out, result.err) == (0, completion_script(shell), "")
    checked = subprocess.run(
        [shell, "-n", "/dev/stdin"], input=result.out, capture_output=True, text=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_another_shell_is_refused_with_those_that_there_are(run: Run) -> None:
    result = run("completion", "fish")
    assert result.code == 2
    assert "invalid choice: 'fish'" in result.err
