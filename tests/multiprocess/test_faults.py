"""A process that cannot write: all raise its error at once, the old checkpoint stays, the next save works."""

from pathlib import Path

import pytest

import shardkeep
from faults.sweep import left_overs
from multiprocess.cluster import Kept
from multiprocess.inside import differences, values_of

# What happens to one process while it saves: (before, after, the error it raises, words of it).
RECORDS = "path / '.shardkeep/saves'"
FAULTS: dict[str, tuple[str, str, str, str]] = {
    "full disk": (
        "fault(path, 'fail', 3, 'write', errno.ENOSPC)",
        "no_fault()",
        "NotEnoughSpaceError",
        "No space left",
    ),
    "quota": ("fault(path, 'fail', 2, 'write', errno.EDQUOT)", "no_fault()", "NotEnoughSpaceError", "quota"),
    "write error": ("fault(path, 'fail', 2, 'write', errno.EIO)", "no_fault()", "StorageError", "Input/output error"),
    "no more files": ("fault(path, 'fail', 2, 'create', errno.ENFILE)", "no_fault()", "StorageError", "open files"),
    "not synced": ("fault(path, 'fail', 3, 'fsync', errno.EIO)", "no_fault()", "StorageError", "Input/output error"),
    "no record": (f"fault({RECORDS}, 'fail', 1, 'create', errno.EACCES)", "no_fault()", "AccessError", "Permission"),
    "not noted": (f"fault({RECORDS}, 'fail', 2, 'write', errno.EIO)", "no_fault()", "StorageError", "Input/output"),
    "file size limit": (
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, -1))",
        "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))",
        "StorageError",
        "File too large",
    ),
    "other user": ("os.seteuid(65534)", "os.seteuid(0)", "AccessError", "Permission denied"),
}

FAIL = """
import errno, resource
path = root / "x"
values = [values_of(n) for n in range(3)]
trees = [arrays_of(v, mesh_over((2, 2)), 1) for v in values]
shardkeep.save(path, trees[0], **KIND)
found = {}
for name, (before, after, *_) in FAULTS.items():
    for call in (shardkeep.save, lambda *a, **k: shardkeep.save_async(*a, **k).wait()):
        meet(root, f"{name} {len(found)}", index, size)
        if index == CULPRIT:
            exec(before)
        try:
            error = caught(call, path, trees[1], overwrite=True, **KIND)
        finally:
            if index == CULPRIT:
                exec(after)
        found.setdefault(name, []).append(error)
        now = shardkeep.load(path)
        error["wrong"] = differences(now, values[0])
shardkeep.save(path, trees[2], overwrite=True, **KIND)
say(found=found, wrong=differences(shardkeep.load(path), values[2]))
"""


@pytest.mark.parametrize(
    ("culprit", "kind"),
    [
        pytest.param(0, "safetensors"),
        pytest.param(0, "tensorstore"),
        pytest.param(1, "tensorstore"),
        (1, "safetensors"),
    ],
)
def test_all_raise_what_one_process_met(pair: Kept, tmp_path: Path, culprit: int, kind: str) -> None:
    faults = FAULTS if culprit == 1 else {n: f for n, f in FAULTS.items() if RECORDS not in f[0]}
    more = {"format": kind}
    said = pair.run(f"FAULTS, CULPRIT, KIND = {faults!r}, {culprit}, {more!r}\n" + FAIL, tmp_path)
    problems: list[str] = []
    for number, process in enumerate(said):
        assert process["wrong"] == []
        for name, errors in process["found"].items():
            for error in errors:
                _, _, kind_of_error, words = FAULTS[name]
                told = [words.lower(), "nothing was committed", *([f"process {culprit}"] if number != culprit else [])]
                missing = [word for word in told if word not in error["message"].lower()]
                if error["kind"] != kind_of_error or missing or error["seconds"] > 3 or error["wrong"]:
                    problems.append(f"{name}, process {number}: without {missing}: {error}")
    assert not problems, "\n".join(problems)
    assert differences(shardkeep.load(tmp_path / "x"), values_of(2)) == []
    assert shardkeep.verify(tmp_path / "x").ok
    assert left_overs(tmp_path / "x") == set()


def test_a_first_save_that_fails_leaves_nothing(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        """
import errno
found = {}
for kind, ending in (("safetensors", ""), ("tensorstore", ""), ("safetensors", ".safetensors")):
    for culprit in (0, 1):
        path = root / f"{kind}{culprit}{ending}"
        if ending and culprit:
            continue  # only the first process writes
        if index == culprit:
            fault(root, "fail", 2, "write", errno.ENOSPC)
        error = caught(shardkeep.save, path, arrays_of(values_of(1), mesh_over((2, 2)), 1), format=kind)
        no_fault()
        meet(root, f"{kind}{culprit}{ending}", index, size)
        found[path.name] = [error["kind"], files_below(path), sorted(n for n in os.listdir(root) if "here" not in n)]
        meet(root, f"{kind}{culprit}{ending} seen", index, size)
say(found=found)
""",
        tmp_path,
    )
    for process in said:
        for name, (kind, files, beside) in process["found"].items():
            assert kind == "NotEnoughSpaceError", name
            assert files == {}, f"{name}: {files}"
            assert not [n for n in beside if n.startswith(".")], f"{name}: {beside}"


def test_a_failed_read_is_told_to_all(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        """
import errno
values = values_of(1)
mesh = mesh_over((2, 2))
shardkeep.save(root / "x", arrays_of(values, mesh))
meet(root, "saved", index, size)
if index == 1:
    fault(root / "x", "fail", 3, "read", errno.EIO)
unreadable = caught(shardkeep.load, root / "x", mesh=mesh, mmap=False)
no_fault()
again = differences(shardkeep.load(root / "x", mesh=mesh), values)
meet(root, "read", index, size)
if index == 0:
    name = max(files_below(root / "x").items(), key=lambda item: item[1])[0]
    with open(root / "x" / name, "r+b") as file:
        file.seek(os.path.getsize(root / "x" / name) // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
meet(root, "damaged", index, size)
damaged = caught(shardkeep.load, root / "x", mesh=mesh)
say(unreadable=unreadable, again=again, damaged=damaged)
""",
        tmp_path,
    )
    for number, process in enumerate(said):
        assert process["again"] == []
        assert process["unreadable"]["kind"] == "StorageError"
        assert "Input/output error" in process["unreadable"]["message"]
        assert ("process 1" in process["unreadable"]["message"]) == (number == 0)
        assert process["unreadable"]["seconds"] < 3
        assert process["damaged"]["kind"] == "IntegrityError"
        assert "does not match its digest" in process["damaged"]["message"]
