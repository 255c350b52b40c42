"""Who serves from which slot: no two from one, none from a slot being written, and the slot that a
new adapter takes is the one whose loss hurts least."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manual_fence import ManualFence

from cupylora.adapters.leases import Reservation, SlotLeases, slot_set
from cupylora.errors import ArgumentError, CapacityError
from cupylora.graphs.fence import DirectFence, StepFence


def leases(*names: str, slots: int = 3, fence: StepFence | None = None) -> SlotLeases:
    made = SlotLeases(slots, fence or ManualFence())
    for name in names:
        load(made, name)
    return made


def load(made: SlotLeases, name: str, keep: tuple[str, ...] = ()) -> int:
    place = made.reserve(name, keep)
    made.fence.wait(made.last_step(place.slot))
    made.publish(place, name)
    return place.slot


def step(made: SlotLeases, *slots: int) -> int:
    used = slot_set(slots)
    made.require_serving(used)
    number = made.fence.submit()
    made.use(used, number)
    return number


def test_free_slots_go_first_then_those_still_read_then_the_adapter_unused_longest() -> None:
    fence = ManualFence()
    made = leases("a", "b", fence=fence)
    assert made.names == ("a", "b", None)
    fence.waited.clear()
    step(made, 0)
    step(made, 1)
    made.drop("b")  # still read
    assert made.free_slots() == (2,)
    assert load(made, "c") == 2
    assert fence.waited == [0]
    assert load(made, "d") == 1
    assert fence.waited == [0, 2]  # the step that read b
    step(made, 0)
    assert load(made, "e") == 2  # c, never used
    assert made.names == ("a", "d", "e")
    assert made.slot_of("c") is None


def test_a_new_version_takes_another_slot_and_the_old_one_is_free_after_its_last_step() -> None:
    fence = ManualFence()
    made = leases("a", "b", fence=fence)
    number = step(made, 0, 1)
    place = made.reserve("a")
    assert place == Reservation(2, None)
    assert made.slot_of("a") == 0  # serves on
    made.publish(place, "a")
    assert made.names == (None, "b", "a")
    assert made.free_slots() == ()
    fence.over = number
    assert made.free_slots() == (0,)


def test_a_new_version_never_takes_the_place_of_the_old_one() -> None:
    made = leases("a", "b", "c")
    assert made.reserve("a").displaced != "a"
    with pytest.raises(CapacityError, match=r"no slot for adapter 'a': 1 slot, and a must stay"):
        leases("a", slots=1).reserve("a")


def test_kept_and_pinned_adapters_stay() -> None:
    made = leases("a", "b", "c")
    made.pin("a")
    assert made.reserve("d", keep=("b",)).displaced == "c"
    with pytest.raises(
        CapacityError, match=r"no slot for adapter 'e': 3 slots, and a, b must stay"
    ):
        made.reserve("e", keep=("b",))
    made.pin("a", False)
    assert made.reserve("e", keep=("b",)).displaced == "a"


def test_a_failed_load_gives_the_slot_back() -> None:
    made = leases("a", slots=1)
    place = made.reserve("b")
    assert (made.names, place.displaced) == ((None,), "a")
    made.give_back(place)
    assert made.names == ("a",)
    made = leases("a", "b", slots=2)
    place = made.reserve("c")
    load(made, "a")  # again, elsewhere, before the other load failed
    made.give_back(place)
    assert sorted(map(str, made.names)) == ["None", "a"]


def test_slots_that_nobody_serves_from_are_named() -> None:
    made = leases("a", "b")
    made.drop("a")
    with pytest.raises(ArgumentError, match=r"no adapter serves from slot 0, 2; load one first"):
        step(made, 0, 1, 2)
    made.reserve("c")
    assert step(made, 1) == 1
    with pytest.raises(ArgumentError, match=r"adapter 'a' is not loaded; loaded are: b"):
        made.require("a")
    with pytest.raises(ArgumentError, match=r"adapter 'x' is not loaded"):
        made.pin("x")


def test_more_adapters_than_slots_are_named() -> None:
    made = leases("a", "b", slots=2)
    made.check_room(["a", "b", "a", "b"])
    with pytest.raises(CapacityError, match=r"3 adapters wanted in one batch, .* 2 slots: a, b, c"):
        made.check_room(["a", "b", "c", "a"])
    made.pin("b")
    made.check_room(["a", "b"])
    with pytest.raises(CapacityError, match=r"2 adapters wanted in one batch beside pinned b"):
        made.check_room(["a", "c"])


def test_numpy_steps_are_over_at_once() -> None:
    made = leases("a", fence=DirectFence())
    step(made, 0)
    made.drop("a")
    assert made.free_slots() == (0, 1, 2)


NAMES = st.sampled_from("abcdef")


class Lives(RuleBasedStateMachine):
    """Loads that begin and end at any time, between steps that end late."""

    @initialize(slots=st.integers(1, 4))
    def start(self, slots: int) -> None:
        self.fence = ManualFence()
        self.made = SlotLeases(slots, self.fence)
        self.writing: dict[int, tuple[Reservation, str]] = {}
        self.served: dict[str, int] = {}
        self.read: dict[int, int] = {}

    @rule(name=NAMES, keep=st.sets(NAMES, max_size=2))
    def reserve(self, name: str, keep: set[str]) -> None:
        try:
            place = self.made.reserve(name, keep)
        except CapacityError:
            occupied = {n for n in self.served if n in keep | {name}}
            assert len(occupied) + len(self.writing) == self.made.max_loras
            return
        assert place.slot not in self.writing
        assert place.displaced not in keep | {name}
        if place.displaced is not None:
            assert self.served.pop(place.displaced) == place.slot
        self.made.fence.wait(self.made.last_step(place.slot))
        assert self.read.get(place.slot, 0) <= self.fence.over
        self.writing[place.slot] = place, name

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), well=st.booleans())
    def end_load(self, data: st.DataObject, well: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.writing)))
        place, name = self.writing.pop(slot)
        if well:
            self.made.publish(place, name)
            self.served[name] = slot
        else:
            self.made.give_back(place)
            if place.displaced is not None:
                self.served.setdefault(place.displaced, slot)

    @precondition(lambda self: self.served)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.served)))
        self.made.drop(name)
        del self.served[name]

    @precondition(lambda self: self.served)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        names = data.draw(st.sets(st.sampled_from(sorted(self.served)), min_size=1))
        number = step(self.made, *(self.served[name] for name in names))
        self.read |= {self.served[name]: number for name in names}

    @rule(steps=st.integers(1, 3))
    def finish(self, steps: int) -> None:
        self.fence.over = min(self.fence.enqueued, self.fence.over + steps)

    @invariant()
    def one_name_a_slot(self) -> None:
        if not hasattr(self, "made"):
            return
        names: list[Any] = [None] * self.made.max_loras
        for name, slot in self.served.items():
            names[slot] = name
        assert self.made.names == tuple(names)
        assert self.made.serving.tolist() == [name is not None for name in names]
        assert not set(self.made.free_slots()) & set(self.writing)
        over = self.fence.over
        assert all(self.read.get(slot, 0) <= over for slot in self.made.free_slots())


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
