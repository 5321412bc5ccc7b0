"""A rule that matches only parts of keys is refused with one that matches the keys; that one can be applied."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from shardkeep import remap
from shardkeep.errors import RemapError
from shardkeep.remap.rules import Rule


def _w() -> Any:
    return np.ones((4, 6), np.float32)


TREE: dict[str, Any] = {
    "enc": {"w": _w(), "b": _w()},
    "model": {"enc": {"w": _w()}, "decoder": {"q": _w(), "k": _w()}},
    "layers": [{"w": _w()}, {"w": _w()}],
    "out_kernel": _w(),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("extending") / "c"
    shardkeep.save(path, TREE)
    return path


def _keys(saved: Path, rule: Rule) -> set[str]:
    tree = shardkeep.load(saved, remap=rule)
    shardkeep.save(saved.parent / "changed", tree, overwrite=True)
    return set(shardkeep.inspect(saved.parent / "changed").leaves)


@pytest.mark.parametrize(
    ("rule", "suggested", "gone", "new"),
    [
        (remap.rename("layers", "blocks"), remap.rename("layers/(.*)", r"blocks/\1"), {"layers/0/w"}, {"blocks/0/w"}),
        (remap.rename("w", "v"), remap.rename("(.*)/w", r"\1/v"), {"enc/w", "layers/1/w"}, {"enc/v", "layers/1/v"}),
        (
            remap.rename("enc", "dec"),
            remap.rename("(.*/)?enc(/.*)?", r"\1dec\2"),
            {"enc/w", "enc/b", "model/enc/w"},
            {"dec/w", "dec/b", "model/dec/w"},
        ),
        (remap.rename("kernel", "w"), remap.rename("(.*)kernel(.*)", r"\1w\2"), {"out_kernel"}, {"out_w"}),
        (
            remap.rename("enc|decoder", "x"),
            remap.rename("(.*/)?(?:enc|decoder)(/.*)?", r"\1x\2"),
            {"enc/w", "model/decoder/q"},
            {"x/w", "model/x/q"},
        ),
        (
            remap.rename(r"layers/(\d)", r"block_\1"),
            remap.rename(r"layers/(\d)/(.*)", r"block_\1/\2"),
            {"layers/0/w"},
            {"block_0/w"},
        ),
        (remap.stack("layers/{i}", "all"), remap.stack("layers/{i}/(.*)", r"all/\1"), {"layers/1/w"}, {"all/w"}),
        (remap.unstack("layers/0", "l/{i}"), remap.unstack("layers/0/(.*)", r"l/{i}/\1"), {"layers/0/w"}, {"l/3/w"}),
        (
            remap.split("layers/0", ["a", "b"]),
            remap.split("layers/0/(.*)", [r"a/\1", r"b/\1"]),
            {"layers/0/w"},
            {"a/w", "b/w"},
        ),
        (
            remap.fuse(["q", "k"], "qk"),
            remap.fuse(["(.*)/q", "(.*)/k"], r"\1/qk"),
            {"model/decoder/q", "model/decoder/k"},
            {"model/decoder/qk"},
        ),
        (remap.drop("layers"), remap.drop("layers/.*"), {"layers/0/w", "layers/1/w"}, set[str]()),
        (
            remap.within("decoder", remap.drop("q")),
            remap.within("(.*/)?decoder", remap.drop("q")),
            {"model/decoder/q"},
            {"model/decoder/k"},
        ),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)
def test_the_rule_that_is_suggested_does_what_was_meant(
    rule: Rule, suggested: Rule, gone: set[str], new: set[str], saved: Path
) -> None:
    with pytest.raises(RemapError, match="patterns match whole keys, which are enc/w, enc/b, ") as refused:
        shardkeep.load(saved, remap=rule)
    said = str(refused.value).rpartition("; try ")[2]
    assert said == str(suggested)
    assert eval(said, {"remap": remap}) == suggested, "it can be pasted into a program"
    keys = _keys(saved, suggested)
    assert gone.isdisjoint(keys)
    assert new <= keys


def test_a_suggestion_below_a_place_is_relative_to_it(saved: Path) -> None:
    with pytest.raises(RemapError, match=r"below 'model'; .* which are enc/w, decoder/q, decoder/k; try ") as refused:
        shardkeep.load(saved, remap=remap.within("model", remap.rename("enc", "dec")))
    inside = remap.rename("enc/(.*)", r"dec/\1")
    assert str(refused.value).endswith(f"; try {inside}")
    assert "model/dec/w" in _keys(saved, remap.within("model", inside))


@pytest.mark.parametrize(
    "rule",
    [
        remap.rename("nothing", "x"),
        remap.rename("layers", "enc/w"),  # would be refused: it is a leaf
        remap.rename("(?i)W", "v"),  # flags must be at the start
        remap.rename("(q)|(k)", "x"),  # what goes before it would change the numbers of its groups
        remap.within("nowhere", remap.drop("w")),
    ],
    ids=str,
)
def test_no_rule_is_suggested_that_would_be_refused_or_match_nothing(rule: Rule, saved: Path) -> None:
    with pytest.raises(RemapError, match="patterns match whole keys, which are") as refused:
        shardkeep.load(saved, remap=rule)
    suggestion = str(refused.value).partition("; try ")[2]
    assert not suggestion
