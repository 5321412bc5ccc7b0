"""The documentation is true: what it shows runs and prints what it says, and what it names exists.

Code on a page is run from top to bottom, in one namespace and one empty directory, warnings being errors; also what
stands in an HTML comment, where a page sets up what readers need not see:

- a `python` block is run; one whose first line is the comment `# name.py` is only written to that file;
- a `console` block holds commands, each after `$ `, and what they print;
- a `text` block right after a `python` block is what that prints, or the error it raises (`SomeError: message`).

What is printed is compared in shape: digits, sizes and times may be others, and `…` stands for anything.
Code with gs:// or s3:// in it gets servers on this machine.
"""

import builtins
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shardkeep
from shardkeep.cli.main import main as shardkeep_command

ROOT = Path(__file__).parents[1]
# What the newest flax uses and JAX 0.8 warns of.
_OLDER_JAX = [f"-Wignore:jax.{name} is deprecated:DeprecationWarning" for name in ("array_ref", "ArrayRef")]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
WITH_CODE = [name for name in NAMES if re.search(r"^```(python|console)", (ROOT / name).read_text(), re.MULTILINE)]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ERROR = re.compile(r"[A-Za-z]+(Error|Exception): ")
_THEMES = {"gh-light-mode-only", "gh-dark-mode-only"}  # what GitHub and the site show an image in
_PLAIN_COMMAND = re.compile(r"shardkeep [^|&;<>$`]*")


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is where its content begins, `shown` what it is said to print."""

    kind: str
    text: str
    line: int
    shown: str | None = None


def blocks_of(text: str) -> Iterator[Block]:
    found = list(_FENCE.finditer(text))
    for match, following in zip(found, [*found[1:], None], strict=True):
        adjacent = following is not None and text[match.end() : following.start()].strip() in ("", "-->")
        shown = following[2] if following is not None and adjacent and following[1] == "text" else None
        yield Block(match[1], match[2], text.count("\n", 0, match.start(2)) + 1, shown)


class Page:
    """A page being run, in the current directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: dict[str, Any] = {"__name__": "__main__"}

    def run(self) -> None:
        for block in blocks_of(self._path.read_text()):
            if block.kind == "python":
                file = re.match(r"# (\w+\.py)\n", block.text)
                if file:
                    Path(file[1]).write_text(block.text)
                else:
                    self._run_python(block)
            elif block.kind == "console":
                self._run_console(block)

    def _run_python(self, block: Block) -> None:
        # Compiled at the lines it has on the page, so that a traceback points there.
        code = compile("\n" * (block.line - 1) + block.text, self._path, "exec")
        if block.shown is None:
            exec(code, self._names)
            return
        said = io.StringIO()
        fails = _ERROR.match(block.shown) is not None
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                exec(code, self._names)
                failed = False
            except Exception as error:
                if not fails:
                    raise
                failed = True
                said.write(f"{type(error).__name__}: {error}\n")
        assert failed == fails, f"{self._path}:{block.line}: no error, but {said.getvalue()}"
        self._compare(block, block.shown, said.getvalue())

    def _run_console(self, block: Block) -> None:
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            self._compare(block, shown, _run_command(command))

    def _compare(self, block: Block, shown: str, said: str) -> None:
        expected = re.escape(_shape(shown)).replace("…", ".*")
        if not re.fullmatch(expected, _shape(said), re.DOTALL):
            raise AssertionError(f"{self._path}:{block.line} shows\n{shown}\nbut this is printed:\n{said}")


def _run_command(command: str) -> str:
    """What a command prints, stdout and stderr. One of ours runs here: a process of its own needs seconds to begin."""
    if _PLAIN_COMMAND.fullmatch(command):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            shardkeep_command(shlex.split(command, comments=True)[1:])
        return said.getvalue()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout


def _shape(text: str) -> str:
    """A text without what differs from run to run: digits, ids, units, room between columns."""
    text = text.replace("PartitionSpec(", "P(")  # JAX 0.8 writes it out
    text = re.sub(r"^WARNING:absl:Grain .*\n", "", text, flags=re.MULTILINE)  # it wants a newer jaxlib
    text = re.sub(r"\b[0-9a-f]{32}\b", "ID", text)
    text = re.sub(r"\b\d{4}-\d\d-\d\dT[\d:.]+\+00:00", "TIME", text)
    text = re.sub(r"\b\d[\d,]*(\.\d+)?(e[+-]\d+)?", "0", text)
    text = re.sub(r"\b0 ([kMGT]?B|[mµn]?s|min|h|d)\b", lambda m: "0 B" if m[1].endswith("B") else "0 s", text)
    text = re.sub(r"\bnow\b", "0 s", text.replace("(now)", "(0 s ago)"))
    return "\n".join(re.sub(r"\s+", " ", line).strip() for line in text.strip().splitlines())


@contextlib.contextmanager
def _environment(text: str) -> Iterator[dict[str, str]]:
    """Eight devices; for code that names buckets, servers that have them."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    code = "\n".join(block.text for block in blocks_of(text) if block.kind in ("python", "console"))
    with contextlib.ExitStack() as servers:
        google = sorted(set(re.findall(r"gs://([\w.-]+)", code)))
        if google:
            from servers.gcs import GCSServer

            server = servers.enter_context(GCSServer(google))
            environment["STORAGE_EMULATOR_HOST"] = server.url
        amazon = sorted(set(re.findall(r"s3://([\w.-]+)", code)))
        if amazon:
            from servers.s3 import shared_s3

            s3 = shared_s3()
            for name in amazon:
                s3.make_bucket(name)
            environment |= {"AWS_ENDPOINT_URL": s3.url, "AWS_REGION": s3.region}
            environment |= {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key}
        yield environment


@pytest.mark.parametrize("name", WITH_CODE)
def test_every_block_runs_and_prints_what_the_page_says(name: str, tmp_path: Path) -> None:
    with _environment((ROOT / name).read_text()) as environment:
        done = subprocess.run(
            [sys.executable, "-W", "error", *_OLDER_JAX, __file__, str(ROOT / name)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, f"{name}:\n{done.stderr}"


def test_shapes_are_compared_and_words_are_not_forgiven() -> None:
    """The tests above would be worth nothing otherwise."""
    assert _shape("run   3 s  1.5 MB") == _shape("run  14 min  28 GB") != _shape("run  3 s  damaged")
    page = Page(Path("page"))
    page._compare(Block("", "", 1), "a … of 5\n", "a file of 7\n")
    for said in ("a file of\n", "a file of 7\nmore\n", "the file of 7\n"):
        with pytest.raises(AssertionError, match="but this is printed"):
            page._compare(Block("", "", 1), "a … of 5\n", said)


def test_the_pages_are_there() -> None:
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/format.md"} <= set(NAMES)
    assert (ROOT / "LICENSE").read_text().lstrip().startswith("Apache License")


def test_the_readme_leads_to_the_pages_beside_it() -> None:
    """mkdocs.yml leads to those of docs/: a page that is not in its `nav` fails the build of the site."""
    linked = set(re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text()))
    assert {name for name in NAMES if "/" not in name and name != "README.md"} <= linked


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target, _, place in re.findall(r"\]\(([^)#]*)(#([^)]*))?\)", page.read_text()):
        if "://" in target:
            continue
        there = page.parent / target if target else page
        assert there.exists(), f"{name} links to {target}"
        places = _headings(there) if there.suffix == ".md" else _THEMES
        assert not place or place in places, f"{name} links to {target}#{place}"


def _headings(page: Path) -> set[str]:
    """The places of a page that can be linked to, as GitHub names them."""
    found = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_exist(name: str) -> None:
    """Everything in backquotes that has a directory and an ending of ours."""
    text = re.sub(r"^```.*?^```", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    for path in re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml))`", text):
        assert any((base / path).exists() for base in (ROOT, ROOT / "src" / "shardkeep")), f"{name} names {path}"


@pytest.mark.parametrize("name", NAMES)
def test_make_targets_that_are_named_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / name).read_text()
    named = {a or b for a, b in re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+) +#", text, re.MULTILINE)}
    assert named <= targets, f"{name} names {sorted(named - targets)}"


@pytest.mark.parametrize("name", NAMES)
def test_public_names_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    for attribute in re.findall(r"\bshardkeep\.([A-Za-z_]+)\b(?!\.)", text):
        if attribute not in ("safetensors", "serialization"):
            known = hasattr(shardkeep, attribute) or (ROOT / "src" / "shardkeep" / f"{attribute}.py").exists()
            assert known, f"{name} names shardkeep.{attribute}"
    for error in re.findall(r"`([A-Z]\w+Error)`", text):
        assert hasattr(builtins, error) or error in shardkeep.__all__, f"{name} names {error}"


def test_readme_names_every_function() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("save", "save_async", "load", "inspect", "verify", "exists", "delete"):
        assert f"shardkeep.{name}(" in readme


def test_the_first_example_is_short() -> None:
    example = next(block for block in blocks_of((ROOT / "README.md").read_text()) if block.kind == "python")
    assert len([line for line in example.text.splitlines() if line.strip()]) <= 15


def test_troubleshooting_shows_every_error() -> None:
    """With a message that a test has seen, or, where that cannot be made on a page, in words."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    errors = {name for name in shardkeep.__all__ if name.endswith("Error")}
    assert {name for name in errors if f"`{name}`" not in text} == set()


def test_warnings_that_are_quoted_are_in_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    rows = re.findall(r"^\| `([^`]*)` \|", page.partition("## Warnings")[2], re.MULTILINE)
    assert len(rows) > 5
    for part in (part.strip(" :") for row in rows for part in row.split("…")):
        assert part in code, part


def test_every_command_is_shown() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    for command in ("ls", "inspect", "verify", "diff", "convert", "stats", "clean", "pin", "unpin", "save-now"):
        assert f"\n$ shardkeep {command}" in page, command


if __name__ == "__main__":
    Page(Path(sys.argv[1])).run()
