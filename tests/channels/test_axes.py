"""Channels of axes: united, divided, flattened, pinned."""

from fst.channels.axes import Axes, times


def test_united_channels_are_one():
    axes = Axes()
    one, two, three = (axes.new(8) for _ in range(3))
    axes.unite(one, two)
    axes.unite(three, two)
    assert axes.now(one) == axes.now(two) == axes.now(three)
    assert not axes.pinned(one[0])
    axes.pin(two, "first")
    axes.pin(one, "second")
    assert axes.pinned(three[0]) == "first"


def test_a_concatenation_divides_what_reads_it():
    axes = Axes()
    left, right, weight = axes.new(8), axes.new(4), axes.new(12)
    axes.unite(weight, left + right)
    other = axes.new(4, "stays"), axes.new(8)
    axes.unite(other[0] + other[1], weight)
    assert [axes.pinned(channel) for channel in weight] == ["stays"] * 4 + [""] * 8
    assert axes.families([left, right, weight, *other]) == [left[:4], left[4:], right]


def test_channels_of_several_axes_are_a_family_if_all_have_them():
    axes = Axes()
    maps, weight = axes.new(6), axes.new(12)
    axes.unite(weight, maps + maps)
    first, rest = axes.part(maps, 0, 2, "why"), axes.part(maps, 2, 6, "why")
    assert axes.families([maps, weight]) == [first, rest]


def test_flattened_maps():
    axes = Axes()
    maps = [axes.new(2, "batch"), axes.new(8), axes.new(3, "rows"), axes.new(5, "columns")]
    flat = axes.reshaped(maps, (2, 120), "why")
    assert flat[1] == times(maps[1], 15)
    assert axes.reshaped(flat, (2, 8, 15), "why")[1] == maps[1]
    head = axes.new(120)
    axes.unite(head, flat[1])
    assert axes.now(head) == axes.now(flat[1]) and axes.families([head]) == [maps[1]]
    axes.reshaped(maps, (2, 2, 4, 15), "shuffle")
    assert {axes.pinned(channel) for channel in maps[1]} == {"shuffle"}


def test_sizes_that_share_no_factor_stay():
    axes = Axes()
    maps = [axes.new(4), axes.new(6)]
    (merged, _) = axes.reshaped(maps, (6, 4), "why")
    assert axes.pinned(merged[0]) == "why"
    assert {axes.pinned(channel) for axis in maps for channel in axis} == {"why"}


def test_merged_behind_another_axis_channels_stay():
    axes = Axes()
    maps = [axes.new(3), axes.new(8)]
    assert axes.reshaped(maps, (24,), "why")[0] == times(maps[0], 8)
    assert axes.pinned(maps[1][0]) == "why" and not axes.pinned(maps[0][0])


def test_channels_of_unequal_lengths_move_as_one():
    axes = Axes()
    flat, channels = axes.new(4), axes.new(6)
    axes.unite(times(flat, 6), times(channels, 4))  # two of the first are three of the others
    ((first, second),) = axes.families([flat, channels])
    assert axes.now(flat) == (first, first, second, second)
    assert axes.now(channels) == (first,) * 3 + (second,) * 3


def test_parts():
    axes = Axes()
    whole = axes.new(12)
    first, second = axes.part(whole, 0, 5, "why"), axes.part(whole, 5, 12, "why")
    assert whole == first + second and axes.families([whole]) == [first, second]
    flat = times(axes.new(4), 3)
    assert len(axes.part(flat, 3, 9, "why")) == 6
    assert not any(map(axes.pinned, flat))
    axes.part(flat, 4, 12, "cut")
    assert {axes.pinned(channel) for channel in flat} == {"cut"}
