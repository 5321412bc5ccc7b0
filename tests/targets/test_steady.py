"""One state of a checkpoint: what looked like damage while it was replaced is none, and trying again has an end."""

from pathlib import Path

import numpy as np
import pytest

import shardkeep
from shardkeep.loading import verify as verifying
from shardkeep.model.manifest import Manifest
from shardkeep.targets.steady import TRIES, Attempt

OLD, NEW = Manifest("/c", "old", {}), Manifest("/c", "new", {})


@pytest.mark.parametrize("error", [shardkeep.IntegrityError("damaged"), FileNotFoundError("gone")])
def test_damage_is_real_only_if_the_manifest_is_the_same(error: Exception) -> None:
    with Attempt(OLD, lambda: NEW) as attempt:
        raise error
    assert attempt.replaced
    with pytest.raises(type(error), match=str(error)), Attempt(OLD, lambda: OLD):
        raise error


def test_other_errors_have_nothing_to_do_with_writers() -> None:
    with pytest.raises(ZeroDivisionError, match="one"), Attempt(OLD, lambda: NEW):
        raise ZeroDivisionError("one")


@pytest.mark.parametrize("sure", [False, True])
def test_the_manifest_is_looked_at_again_unless_that_is_not_needed(sure: bool) -> None:
    looks: list[Manifest] = []
    with Attempt(OLD, lambda: looks.append(NEW) or NEW) as attempt:
        attempt.sure = sure
    assert attempt.replaced is not sure
    assert len(looks) == (not sure)


def test_verify_gives_up_on_a_checkpoint_that_is_always_being_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shardkeep.save(tmp_path / "c", {"w": np.ones(3)})
    (file,) = shardkeep.inspect(tmp_path / "c").tree().files
    (tmp_path / "c" / file.name).unlink()
    assert "is missing" in shardkeep.verify(tmp_path / "c").problems[0].message
    monkeypatch.setattr(verifying, "_look", lambda *_: NEW)
    (problem,) = shardkeep.verify(tmp_path / "c").problems
    assert f"was replaced {TRIES} times while it was being checked" in problem.message
