"""A few points of each part of `make faults`, and that its table is made."""

import errno
from pathlib import Path

import pytest

from faults import __main__ as main
from faults import denied, disks, doubt, exit, full, power, runs, together
from faults.pool import each
from faults.result import Result
from faults.spawner import Fault, Spawner
from faults.sweep import SCENARIOS, Violation

needs_disks = pytest.mark.skipif(bool(disks.missing("mkfs.ext4")), reason=disks.missing("mkfs.ext4"))
needs_clones = pytest.mark.skipif(bool(disks.missing("mkfs.xfs")), reason=disks.missing("mkfs.xfs"))


@pytest.mark.parametrize(("victim", "call"), [(0, 20), (1, 9)])
def test_one_of_two_processes_is_killed_just_before_the_end(spawner: Spawner, victim: int, call: int) -> None:
    assert together._check(spawner, together._Series(victim, "safetensors", call, 1000)) == 1


@needs_clones
def test_after_a_power_cut_the_old_state_or_the_new_one_is_there(tmp_path: Path, spawner: Spawner) -> None:
    """At the last calls of an overwrite, and after it has returned: then it must be the new one."""
    scenario = SCENARIOS["overwrite, safetensors"]
    with disks.cloning(tmp_path) as place:
        cuts = list(power.stepped_cuts(scenario, place / "x", spawner))
        assert len(cuts) > 15
        assert cuts[-1].returned
        for cut in cuts[-6:]:
            power.check_cut(scenario, cut, place / "looked at")


@needs_clones
def test_after_a_power_cut_a_run_continues_with_its_newest_step(tmp_path: Path) -> None:
    """At every twelfth call of a program that resumes, saves and deletes, and after it has ended."""
    with Spawner("faults.runs") as spawner, disks.cloning(tmp_path) as place:
        scenario = power.RUNS["train"]
        cuts = list(power.stepped_cuts(scenario, place / "x", spawner))
        assert cuts[-1].returned
        for cut in cuts[::-12]:
            power.check_run_cut(scenario, cut, place / "looked at")


@pytest.mark.parametrize("action", ["train", "go_back"])
def test_a_program_that_writes_a_run_is_killed(tmp_path: Path, action: str) -> None:
    with Spawner("faults.runs") as spawner:
        assert runs.sweep(spawner, tmp_path / "torn", action, "torn", every=7) > 5
        assert runs.sweep(spawner, tmp_path / "fail", action, "fail", every=15) > 0


@needs_disks
@pytest.mark.parametrize("free", [0, 3 << 20])
def test_a_disk_too_small_for_a_first_save(spawner: Spawner, free: int) -> None:
    full._check_before(spawner, full._Point("ext4", "run", False, free=free))


@needs_disks
def test_a_disk_that_is_filled_by_someone_else_during_an_overwrite(spawner: Spawner) -> None:
    full._check_during(spawner, full._Point("ext4", "run", True, call=3))


@needs_disks
def test_a_full_disk_that_only_the_sync_tells_of(spawner: Spawner) -> None:
    full._check_late(spawner, full._Point("ext4 on tmpfs", "run", True))


def test_no_space_for_the_directory_itself_says_how_much_is_needed(tmp_path: Path, spawner: Spawner) -> None:
    fault = Fault(str(tmp_path), "fail", 1, errno.ENOSPC, calls="mkdir")
    outcome = spawner.run("save", fault, path=str(tmp_path / "new" / "run"), kind="plain", number=1)
    assert outcome.error == "NotEnoughSpaceError", outcome.log
    assert "bytes and" in outcome.message


@pytest.mark.parametrize("what", ["removed", "renamed"])
def test_a_directory_that_vanishes(spawner: Spawner, what: str) -> None:
    denied._check_vanishing(spawner, denied._Point(what, 0, 15, overwrite=False))


@pytest.mark.parametrize("spare", [0, 2, 4])
def test_too_many_open_files(spawner: Spawner, spare: int) -> None:
    denied._check_few_files(spawner, denied._Point("few files", 1, spare))


@needs_disks
def test_a_disk_that_goes_away_before_the_commit(spawner: Spawner) -> None:
    denied._check_pulled_out(spawner, denied._Point("pulled out", 0, 13))


@needs_disks
@pytest.mark.parametrize("how", ["mmap", "read"])
def test_a_medium_that_cannot_be_read(spawner: Spawner, how: str) -> None:
    denied._check_medium(spawner, denied._Point(how, 0, 1))


@pytest.mark.parametrize("how", ["interrupt", "fail", "terminate"])
def test_a_program_that_ends_during_a_save(spawner: Spawner, how: str) -> None:
    exit._check(spawner, exit._Point(how, "safetensors", True, 9))


@pytest.mark.parametrize("call", [7, 13])
def test_a_clean_up_beside_a_live_save(spawner: Spawner, call: int) -> None:
    doubt._check_beside(spawner, doubt._Point("safetensors", False, call))


def test_what_breaks_is_told_with_the_point_where() -> None:
    def check(spawner: Spawner, item: int) -> int:
        if item == 2:
            raise Violation("a mix")
        if item == 3:
            raise KeyError("lost")
        return 10

    found = each("a fault", "somehow", check, [1, 2, 3])
    assert (found.points, sorted(found.violations)) == (12, ["2: a mix", "3: KeyError: 'lost'"])


def test_the_page_gets_new_rows_for_the_parts_that_were_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(main, "PAGE", tmp_path / "page.md")
    main.PAGE.write_text(f"before\n{main.BEGIN}\n{main.END}\nafter\n")
    main.write_page(
        {"kill": [Result("a kill", "at once", 1234, ())], "rot": [Result("rot", "a bit", 5, ("3: a mix",))]}
    )
    main.write_page({"kill": [Result("a kill", "again", 1, ("7: lost",), "some")]})
    page = main.PAGE.read_text()
    assert page.startswith(f"before\n{main.BEGIN}\n20")
    assert page.endswith(f"{main.END}\nafter\n")
    assert "6 points, 2 violations" in page
    assert "| kill | a kill | again | 1 | 1 | some |\n| rot | rot | a bit | 5 | 1 |  |\n" in page
    assert "\n- kill: a kill: 7: lost\n- rot: rot: 3: a mix\n" in page
