"""Repeated units on one line."""

from __future__ import annotations

from partitioner.report.folding import fold, folded_name, ranges


def test_ranges() -> None:
    assert ranges([5, 0, 1, 2, 1]) == "0-2,5"
    assert ranges([7]) == "7"


def test_names_that_differ_in_their_first_number() -> None:
    assert folded_name(["layers.0.mlp", "layers.1.mlp", "layers.3.mlp"]) == "layers.{0-1,3}.mlp"
    assert folded_name(["head"]) == "head"
    assert folded_name(["layers.0..1", "layers.2..3"]) == "layers.{0..1, 2..3}"


def test_interleaved_rows_fold_by_name_and_fate() -> None:
    rows = [("layers.0.attn", "keep"), ("layers.0.mlp", "keep"), ("layers.1.attn", "keep"), ("layers.1.mlp", "drop")]
    folded = fold(rows, lambda r: r[0], lambda r: r[1])
    assert [(name, len(group)) for name, group in folded] == [
        ("layers.{0-1}.attn", 2), ("layers.0.mlp", 1), ("layers.1.mlp", 1),
    ]  # fmt: skip


def test_a_long_list_shows_its_ends_and_no_number_is_cut() -> None:
    assert folded_name([f"h.{i}..{i + 3}" for i in range(8, 32, 4)]) == "h.{8..11, ..., 28..31}"
    assert folded_name(["h.10..11", "h.12..13"]) == "h.{10..11, 12..13}"
