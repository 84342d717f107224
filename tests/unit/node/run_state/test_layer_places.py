"""Which node is asked for which copy, and when a snapshot counts as complete."""

from hashlib import sha256

import pytest

from node.run_state.layer_places import PATIENCE, Ask, LayerPlaces
from node.state.manifest import UnitEntry, unit_file
from wire.messages import HeldLayer

UNITS = ("embed", "block.0000", "head")
HERE = ("a", "b", "c")
MAKERS = {unit: (node,) for unit, node in zip(UNITS, HERE, strict=True)}
SIZE = 100


def file(unit: str, step: int = 4, content: str = "", *, weights: str = "w", size: int = SIZE) -> HeldLayer:
    digest = sha256(f"{unit} {content}".encode()).hexdigest()
    return HeldLayer(step=step, unit=unit, bytes=size, sha256=digest, weights_sha256=weights)


def agreed(step: int = 4, content: str = "") -> dict[str, str]:
    return {unit: file(unit, step, content).sha256 for unit in UNITS}


def saved(step: int = 4) -> LayerPlaces:
    """Every stage's node has saved its own layer of `step`."""
    places = LayerPlaces(UNITS)
    places.expect(step, MAKERS, 0.0)
    places.agreed(step, agreed(step))
    for unit, (node,) in MAKERS.items():
        assert places.held(node, file(unit, step))
    return places


def complete(step: int = 4) -> LayerPlaces:
    places = saved(step)
    for ask in places.asks(HERE, 1.0):
        for unit in ask.units:
            assert places.held(ask.node_id, file(unit, step))
    places.completed(step)
    return places


def test_without_spares_the_next_in_the_ring_holds_a_copy() -> None:
    places = saved()
    assert not places.is_whole(4, HERE, 1.0)
    assert places.asks(HERE, 1.0) == [
        Ask(node_id="b", step=4, units=("embed",)),
        Ask(node_id="c", step=4, units=("block.0000",)),
        Ask(node_id="a", step=4, units=("head",)),
    ]
    assert places.asks(HERE, 2.0) == [], "they are asked once"
    for node, unit in zip("bca", UNITS, strict=True):
        assert places.held(node, file(unit))
    assert places.is_whole(4, HERE, 3.0) and places.asks(HERE, 3.0) == []


def test_a_spare_has_least_and_is_asked_first() -> None:
    asks = saved().asks((*HERE, "spare"), 1.0)
    assert asks[0] == Ask(node_id="spare", step=4, units=("embed", "head"))


def test_rows_that_save_the_same_state_need_no_copies() -> None:
    places = LayerPlaces(UNITS)
    places.expect(4, {unit: (node, node.upper()) for unit, (node,) in MAKERS.items()}, 0.0)
    places.agreed(4, agreed())
    here = (*HERE, "A", "B", "C")
    for node, unit in zip(HERE, UNITS, strict=True):
        assert places.held(node, file(unit))
    assert places.asks(here, 1.0) == []
    for node, unit in zip("ABC", UNITS, strict=True):
        assert places.held(node, file(unit))
    assert places.is_whole(4, here, 1.0)


def test_who_lies_about_a_right_file_does_not_keep_others_from_it() -> None:
    """Its SHA-256 is agreed on; a maker that says another size first, or as often as others, is found out by
    who fetches from it."""
    places = LayerPlaces(UNITS)
    places.expect(4, {unit: (node, node.upper()) for unit, (node,) in MAKERS.items()}, 0.0)
    places.agreed(4, agreed())
    lie, right = file("embed", size=SIZE - 1, weights="lie"), file("embed")
    assert places.held("a", lie) and places.held("A", right)
    assert places.holders(4, "embed") == ("a",)
    assert places.doubted("c", 4, "embed", by="x") is False and places.doubted("a", 4, "embed", by="x")
    assert places.entry(4, "embed") == UnitEntry("embed", unit_file("embed"), SIZE, right.sha256, "w")
    assert places.held("a", lie) and places.holders(4, "embed") == ("A",)
    assert places.held("b", right) and places.holders(4, "embed") == ("A", "b")


def test_nodes_without_the_state_do_not_outvote_who_made_the_file() -> None:
    places, lie = saved(), file("embed", size=SIZE - 1, weights="lie")
    for liar in ("x", "y", "z"):
        assert not places.held(liar, lie)
    assert places.holders(4, "embed") == ("a",)
    for _ in range(2):
        assert places.entry(4, "embed") == UnitEntry("embed", unit_file("embed"), SIZE, lie.sha256, "w")
        assert not places.is_whole(4, (*HERE, "x", "y", "z"), 1.0)
        places.doubted("a", 4, "embed", by="x")


def test_uploads_of_another_attempt_do_not_count() -> None:
    places = saved()
    assert not places.held("b", file("embed", content="other bits"))
    assert not places.held("b", file("embed", size=SIZE + 1))
    assert not places.held("b", file("embed", step=5)) and not places.held("b", file("tail"))
    places.expect(4, MAKERS, 5.0)
    assert not places.held("b", file("embed")), "only who has the state says first what the file is"
    assert places.held("a", file("embed", content="other bits"))
    assert places.holders(4, "embed") == (), "nobody has agreed to it"
    assert places.agreed(4, agreed(content="other bits")) == []
    assert places.holders(4, "embed") == ("a",)


def test_a_layer_that_is_not_the_one_agreed_on_is_nobodys_to_fetch() -> None:
    places = LayerPlaces(UNITS)
    places.expect(4, {unit: (node, node.upper()) for unit, (node,) in MAKERS.items()}, 0.0)
    assert places.held("a", file("embed", content="zeros")) and places.held("A", file("embed"))
    assert places.asks(HERE, 1.0) == [] and places.entry(4, "embed") is None, "first all agree"
    assert places.agreed(4, agreed()) == [("a", "embed")]
    assert places.holders(4, "embed") == ("A",)
    lie = file("head", content="zeros")
    assert not places.held("c", lie) and places.is_wrong("c", lie)
    assert not places.is_wrong("c", file("head")) and not places.is_wrong("b", lie), "b made no head"


def test_in_an_object_store_another_row_saves_what_was_refused() -> None:
    places = LayerPlaces(UNITS)
    places.expect(4, {unit: (f"{node}1", f"{node}2") for unit, (node,) in MAKERS.items()}, 0.0, "s3://b/run")
    bad = file("embed", content="bad")
    assert places.held("a1", bad)  # nobody knows yet what it is
    assert places.agreed(4, agreed()) == [("a1", "embed")]
    assert places.others("a1", 4) == {"a2": ("embed",)}
    assert places.others("a1", 4) == {} and not places.held("a1", file("embed"))
    assert places.held("b1", file("block.0000")) and places.others("b1", 4) == {}
    assert not places.held("c1", file("head", content="bad"))
    assert places.is_wrong("c1", file("head", content="bad"))
    assert places.others("c1", 4) == {"c2": ("head",)}
    for node, unit in (("a2", "embed"), ("c2", "head")):
        assert not places.is_whole(4, HERE, 1.0)
        assert places.held(node, file(unit))
    assert places.is_whole(4, HERE, 1.0)
    assert places.others("c2", 4) == {} == saved().others("a", 4) == places.others("a1", 5)


def test_a_node_alone_holds_the_only_copy() -> None:
    places = LayerPlaces(UNITS)
    places.expect(4, dict.fromkeys(UNITS, ("a",)), 0.0)
    places.agreed(4, agreed())
    for unit in UNITS:
        places.held("a", file(unit))
    assert places.is_whole(4, ("a",), 0.0) and places.asks(("a",), 0.0) == []


def test_slow_nodes_and_full_disks_are_replaced() -> None:
    places = saved()
    assert places.asks(HERE, 1.0)[0].node_id == "b"
    later = 2 * PATIENCE
    assert ("c", ("embed",)) in [(ask.node_id, ask.units) for ask in places.asks(HERE, later)]
    places.lost("c", 4, "embed", later)
    places.lost("b", 4, "embed", later)
    for node, unit in (("c", "block.0000"), ("a", "head")):
        places.held(node, file(unit))
    assert places.is_whole(4, HERE, later), "nobody else has room for a copy"
    again = {(ask.node_id, ask.units) for ask in places.asks(HERE, later + 2 * PATIENCE)}
    assert again and again <= {("b", ("embed",)), ("c", ("embed",))}


def test_a_node_that_never_says_whether_it_has_copied_keeps_no_snapshot_incomplete() -> None:
    """Where no other node is there, the run would wait for it without end."""
    places, here = LayerPlaces(UNITS), ("a", "b")
    places.expect(4, dict.fromkeys(UNITS, ("a",)), 0.0)
    places.agreed(4, agreed())
    for unit in UNITS:
        places.held("a", file(unit))
    asked = Ask(node_id="b", step=4, units=UNITS)
    for at in (1.0, 2 * PATIENCE):
        assert not places.is_whole(4, here, at)
        assert places.asks(here, at) == [asked]
    assert places.is_whole(4, here, 2 * PATIENCE)
    assert places.asks(here, 4 * PATIENCE) == [asked], "it may still do it"
    for node in "bc":
        places.held(node, file("embed"))
    assert not places.is_whole(4, "bc", 4 * PATIENCE)


@pytest.mark.parametrize("early", [False, True], ids=["agreed on", "before it is agreed on"])
def test_a_maker_that_starts_again_names_its_file_without_the_hash_of_the_weights(early: bool) -> None:
    places = LayerPlaces(UNITS)
    places.expect(4, MAKERS, 0.0)
    if not early:
        places.agreed(4, agreed())
    for weights in ("w", ""):
        for node, unit in zip(HERE, UNITS, strict=True):
            assert places.held(node, file(unit, weights=weights))
    if early:
        places.agreed(4, agreed())
    for ask in places.asks(HERE, 1.0):
        assert all(places.held(ask.node_id, file(unit)) for unit in ask.units)
    assert places.is_whole(4, HERE, 2.0)
    assert [entry.weights_sha256 for entry in places.entries(4)] == ["w"] * len(UNITS)


def test_a_layer_is_gone_with_its_maker_until_others_have_it() -> None:
    places = saved()
    assert places.gone(4, HERE) == () and places.gone(4, "bc") == ("embed",)
    assert places.held("b", file("embed"))
    assert places.gone(4, "bc") == () and places.gone(4, "c") == ("embed", "block.0000")
    places.expect(8, MAKERS, 0.0)
    assert places.gone(8, ()) == (), "nobody has saved anything yet"
    assert places.held("a", file("embed", 8)) and places.gone(8, "bc") == ("embed",)


def test_a_copy_is_made_again_when_its_holder_is_gone() -> None:
    places = complete()
    here = ("a", "c")
    asks = {unit: ask.node_id for ask in places.asks(here, 9.0) for unit in ask.units}
    assert asks == {"embed": "c", "block.0000": "a"}
    assert places.missing(4, here) == () and places.missing(4, ("c",)) == ("embed",)


def test_a_copy_in_doubt_counts_until_its_holder_has_looked_if_the_snapshot_is_complete() -> None:
    places = complete()
    assert places.doubted("b", 4, "embed", by="x") and not places.doubted("c", 4, "embed", by="x")
    assert places.holders(4, "embed") == ("a", "b")
    places.lost("b", 4, "embed", 0.0)
    assert places.holders(4, "embed") == ("a",)
    places = saved()
    assert places.held("b", file("embed")) and places.doubted("b", 4, "embed", by="x")
    assert places.holders(4, "embed") == ("a",)
    assert places.held("b", file("embed")) and places.holders(4, "embed") == ("a", "b")


def test_who_keeps_doubting_copies_does_not_keep_a_snapshot_from_completing() -> None:
    places = saved()
    assert places.held("b", file("embed"))
    for by, holders in (("x", ("a",)), ("x", ("a", "b")), ("y", ("a",)), ("x", ("a", "b"))):
        assert places.doubted("b", 4, "embed", by=by)
        assert places.holders(4, "embed") == holders
        assert places.held("b", file("embed"))
    places.expect(4, MAKERS, 5.0)
    assert not places.doubted("b", 4, "embed", by="x"), "of another attempt"


def test_older_ones_under_way_are_given_up_for_a_complete_one() -> None:
    places = saved(4)
    places.expect(6, MAKERS, 2.0)
    places.expect(8, MAKERS, 3.0)
    places.agreed(6, agreed(6))
    for unit, (node,) in MAKERS.items():
        places.held(node, file(unit, 6))
    places.completed(6)
    assert places.complete == (6,) and places.under_way == (8,) and 4 not in places


def test_a_new_coordinator_learns_who_holds_which_layers() -> None:
    entries = complete().entries(4)
    places = LayerPlaces(UNITS)
    places.load(4, entries, {"embed": ["a"]})
    assert places.complete == (4,) and places.holders(4, "embed") == ("a",)
    assert places.held("c", file("head", weights="")) and places.holders(4, "head") == ("c",)
    assert not places.held("c", file("head", content="damaged"))
    assert places.holders(4, "head") == (), "and a holder whose file is another one is none"
