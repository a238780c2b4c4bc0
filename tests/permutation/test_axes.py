"""Families of channels: united, divided, flattened, pinned."""

from fst.permutation.axes import Axes, Piece


def test_united_families_are_one():
    axes = Axes()
    one, two, three = (axes.new(8) for _ in range(3))
    axes.unite(one, two, "why")
    axes.unite(three, two, "why")
    assert axes.now(one) == axes.now(two) == axes.now(three)
    assert not axes.pinned(axes.now(one)[0].family)
    axes.pin(two, "first")
    axes.pin(one, "second")
    assert axes.pinned(axes.now(three)[0].family) == "first"


def test_a_concatenation_divides_what_reads_it():
    axes = Axes()
    left, right, weight = axes.new(8), axes.new(4), axes.new(12)
    axes.unite(weight, left + right, "why")
    assert axes.now(weight) == axes.now(left + right)
    other = axes.new(4, "stays"), axes.new(8)
    axes.unite(other[0] + other[1], weight, "why")  # 4, 4 and 4
    pieces = axes.now(weight)
    assert [axes.size(family) for family, _ in pieces] == [4, 4, 4]
    assert [axes.pinned(family) for family, _ in pieces] == ["stays", "", ""]
    assert axes.now(left) == pieces[:2] and axes.now(right) == pieces[2:]


def test_flattened_maps():
    axes = Axes()
    maps = [axes.new(2, "batch"), axes.new(8), axes.new(3, "rows"), axes.new(5, "columns")]
    flat = axes.reshaped(maps, (2, 120), "why")
    assert axes.now(flat[1]) == (Piece(maps[1][0].family, 15),)
    assert axes.reshaped(flat, (2, 8, 15), "why")[1] == maps[1]
    head = axes.new(120)
    axes.unite(head, flat[1], "why")
    assert axes.now(head) == axes.now(flat[1]) and axes.length(head) == 120
    axes.reshaped(maps, (2, 2, 4, 15), "shuffle")
    assert axes.pinned(maps[1][0].family) == "shuffle"


def test_sizes_that_share_no_factor_stay():
    axes = Axes()
    maps = [axes.new(4), axes.new(6)]
    (merged, _) = axes.reshaped(maps, (6, 4), "why")
    assert axes.pinned(merged[0].family) == "why"
    assert [axes.pinned(axis[0].family) for axis in maps] == ["why", "why"]


def test_merged_behind_another_axis_channels_stay():
    axes = Axes()
    maps = [axes.new(3), axes.new(8)]
    assert axes.now(axes.reshaped(maps, (24,), "why")[0]) == (Piece(maps[0][0].family, 8),)
    assert axes.pinned(maps[1][0].family) == "why" and not axes.pinned(maps[0][0].family)


def test_pieces_that_do_not_fit_stay():
    axes = Axes()
    flat, channels = (Piece(axes.new(4)[0].family, 6),), (Piece(axes.new(6)[0].family, 4),)
    axes.unite(flat, channels, "why")
    assert axes.pinned(flat[0].family) == axes.pinned(channels[0].family) == "why"
    (piece,) = itself = axes.new(4)
    axes.unite((Piece(piece.family, 2),), itself * 2, "twice")
    assert axes.pinned(piece.family) == "twice"


def test_parts():
    axes = Axes()
    whole = axes.new(12)
    first, second = axes.part(whole, 0, 5, "why"), axes.part(whole, 5, 12, "why")
    assert axes.now(whole) == first + second and axes.length(first) == 5
    flat = (Piece(axes.new(4)[0].family, 3),)
    assert axes.length(axes.part(flat, 3, 9, "why")) == 6
    assert not any(axes.pinned(family) for family, _ in axes.now(flat))
    axes.part(flat, 4, 12, "cut")
    assert all(axes.pinned(family) == "cut" for family, _ in axes.now(flat))
