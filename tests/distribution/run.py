"""The wheel and the sdist as a stranger gets them, installed into fresh environments. Run it by `make test-wheel`.

Both are built from a copy of the repository's files and put into dist/. Then each is installed for each Python that is
present, with what it depends on and nothing else, and `smoke.py` uses it from an empty directory. `build` needs an
environment of its own, and installing takes minutes, so this is no part of the other tests.
"""

import email
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
# In the sdist beside the package: what it is built with, and what people read. The tests need the repository.
BESIDE = {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md", "mkdocs.yml"}
BUILT_WITH = {"MANIFEST.in", "PKG-INFO", "pyproject.toml", "setup.cfg"}
FOLDERS = {"docs", "examples", "src"}
LARGEST = 1_500_000  # bytes of either; each has about 0.7 MB


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return sorted(name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())


def build(names: Sequence[str], room: Path) -> tuple[Path, Path]:
    """The wheel and the sdist. From a copy: what an earlier build left in the repository would get into them."""
    copy = room / "repository"
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    made = room / "dist"
    command = [sys.executable, "-m", "build", "--outdir", str(made), str(copy)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stdout)
    (wheel,), (sdist,) = made.glob("*.whl"), made.glob("*.tar.gz")
    return wheel, sdist


def check_wheel(wheel: Path, names: Sequence[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = archive.namelist()
        (metadata,) = (archive.read(name) for name in found if name.endswith(".dist-info/METADATA"))
    modules = {name.removeprefix("src/") for name in names if name.startswith("src/shardkeep/")}
    package = {name for name in found if ".dist-info/" not in name}
    assert package == modules, f"not in both: {sorted(package ^ modules)}"
    Metadata.from_email(metadata, validate=True)
    fields = email.message_from_bytes(metadata)
    assert fields["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("/licenses/LICENSE") for name in found)
    assert "# shardkeep" in str(fields.get_payload())
    assert wheel.stat().st_size < LARGEST


def check_sdist(sdist: Path, names: Sequence[str]) -> None:
    with tarfile.open(sdist) as archive:
        members = [member for member in archive if member.isfile()]
    found = {member.name.partition("/")[2] for member in members}
    wanted = {name for name in names if name in BESIDE or name.partition("/")[0] in FOLDERS}
    assert wanted <= found, f"missing: {sorted(wanted - found)}"
    more = {name for name in found - wanted - BUILT_WITH if ".egg-info/" not in name}
    assert not more, f"not wanted: {sorted(more)}"
    assert wanted >= BESIDE
    assert sdist.stat().st_size < LARGEST


def interpreter(version: str) -> list[str] | None:
    """How to start a version of Python, or None where it is not installed."""
    words = ["env", f"PYENV_VERSION={version}", f"python{version}"]
    found = subprocess.run([*words, "--version"], capture_output=True, check=False)
    return words if found.returncode == 0 else None


def try_installed(python: Sequence[str], distribution: Path, room: Path) -> None:
    """Install it into a fresh environment and use it from an empty directory."""
    home = room / "environment"
    empty = room / "empty"
    empty.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}", "SHARDKEEP_INSTALLED": str(home)}

    def run(*words: object) -> None:
        done = subprocess.run(
            [*map(str, words)], cwd=empty, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, words))}:\n{done.stdout}{done.stderr}")

    run(*python, "-m", "venv", home)
    run(home / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", distribution)
    run(home / "bin" / "python", "-m", "pip", "check")
    run(home / "bin" / "python", "-I", "-W", "error", SMOKE)


def main(versions: Sequence[str]) -> None:
    names = tracked()
    pythons = {version: interpreter(version) for version in versions}
    assert any(pythons.values()), f"none of these is installed: Python {', '.join(versions)}"
    with tempfile.TemporaryDirectory() as directory:
        wheel, sdist = build(names, Path(directory))
        check_wheel(wheel, names)
        check_sdist(sdist, names)
        for distribution in (wheel, sdist):
            print(f"{distribution.name}: {distribution.stat().st_size:,} bytes", flush=True)
        for version, python in pythons.items():
            for distribution in (wheel, sdist):
                if python is None:
                    print(f"skipped: Python {version} is not installed")
                    break
                with tempfile.TemporaryDirectory() as room:
                    try_installed(python, distribution, Path(room))
                print(f"ok: {distribution.name} on Python {version}", flush=True)
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        shutil.copytree(wheel.parent, ROOT / "dist")


if __name__ == "__main__":
    main(sys.argv[1:])
