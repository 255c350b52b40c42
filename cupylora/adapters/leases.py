"""Which slot holds which adapter, and which slots steps under way still read.

In: names that come and go, and the slots that each step used. Out: the slot that a new adapter
takes. Host bookkeeping only: ``SlotTable`` holds the weights, ``StepFence`` says which steps are
over.

A slot is *named* (its adapter serves), *reserved* (an adapter is being written into it) or free.
Its lease is the last step that used it: nothing is written into a slot before that step is over,
named or not. So a name can move to another slot, or go, while steps that read the old one finish.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cupylora.checks import check_max_loras
from cupylora.errors import ArgumentError, CapacityError
from cupylora.graphs.fence import StepFence
from cupylora.text import counted, listed, shown

__all__ = ["Reservation", "SlotLeases", "SlotSet", "slot_set", "slots_in"]

SlotSet = int
"""Slots as a number whose byte n is 1 where slot n is in: as an array of booleans lies in memory,
but compared and hashed in a fraction of its time."""

_MOST_USES = 64
"""Distinct sets of slots whose last steps are kept before they become each slot's own."""


def slot_set(slots: Iterable[int]) -> SlotSet:
    """The set of ``slots``."""
    return sum(1 << 8 * slot for slot in set(slots))


def slots_in(used: SlotSet) -> list[int]:
    """The slots of a set, rising."""
    size = (used.bit_length() + 7) // 8
    return [slot for slot, is_in in enumerate(used.to_bytes(size, "little")) if is_in]


@dataclass(frozen=True)
class Reservation:
    """A slot to write into. displaced: whose slot it was until now, if anybody's."""

    slot: int
    displaced: str | None


class SlotLeases:
    """Names and leases of ``max_loras`` slots. One thread at a time: callers hold a lock."""

    def __init__(self, max_loras: int, fence: StepFence) -> None:
        self.max_loras = check_max_loras(max_loras)
        self.fence = fence
        self.serving = np.zeros(max_loras, np.bool_)
        """Which slots are named."""
        self._vacant = slot_set(range(max_loras))
        self._names: list[str | None] = [None] * max_loras
        self._slot_of: dict[str, int] = {}
        self._last_steps = [0] * max_loras
        self._uses: dict[SlotSet, int] = {}
        self._named_at = [(0, 0)] * max_loras
        self._loads = 0
        self._reserved: set[int] = set()
        self._pinned: set[str] = set()

    @property
    def names(self) -> tuple[str | None, ...]:
        """The adapter of each slot; None: none serves from it."""
        return tuple(self._names)

    def slot_of(self, name: str) -> int | None:
        """The slot of an adapter; None: it has none."""
        return self._slot_of.get(name)

    def require(self, name: str) -> int:
        """The slot of an adapter. Raises ArgumentError if it has none."""
        slot = self._slot_of.get(name)
        if slot is None:
            loaded = ", ".join(map(shown, sorted(self._slot_of))) or "none"
            raise ArgumentError(
                f"adapter {name!r} is not loaded; loaded are: {loaded}. Load it (again, where it "
                "had to make room), and pin what must stay"
            )
        return slot

    def use(self, used: SlotSet, step: int) -> None:
        """``step``, later than all before, reads the slots in ``used``."""
        self._uses[used] = step
        if len(self._uses) > _MOST_USES:
            self._note_uses()

    def require_serving(self, used: SlotSet) -> None:
        """Raise ArgumentError if a slot in ``used`` has no adapter."""
        vacant = used & self._vacant
        if vacant:
            raise ArgumentError(
                f"no adapter serves from slot {', '.join(map(str, slots_in(vacant)))}; load one "
                "first, or use -1 for rows of no adapter"
            )

    def pin(self, name: str, pinned: bool = True) -> None:
        """Keep an adapter's slot from being taken by another, or no longer."""
        self.require(name)
        (self._pinned.add if pinned else self._pinned.discard)(name)

    def free_slots(self) -> tuple[int, ...]:
        """Slots without a name that no step reads any more."""
        over = self.fence.finished()
        return tuple(
            slot
            for slot in range(self.max_loras)
            if self._names[slot] is None
            and slot not in self._reserved
            and self.last_step(slot) <= over
        )

    def reserve(self, name: str, keep: Collection[str] = ()) -> Reservation:
        """A slot for ``name``: free, else one still read, else that of the adapter whose last step,
        or load if that came later, is longest ago.

        Adapters in ``keep`` and pinned ones, and the former version of ``name`` itself, stay.
        Raises CapacityError that names what is in the way.
        """
        staying = {name, *keep, *self._pinned}
        open_slots = [
            slot
            for slot in range(self.max_loras)
            if slot not in self._reserved and self._names[slot] not in staying
        ]
        if not open_slots:
            kept = listed(map(shown, sorted(n for n in self._slot_of if n in staying)))
            raise CapacityError(
                f"no slot for adapter {name!r}: {counted(self.max_loras, 'slot')}, and "
                f"{kept or 'adapters being loaded'} must stay; unload one, pin it no "
                "longer, or make the runtime with more max_loras"
            )
        over = self.fence.finished()
        slot = min(
            open_slots,
            key=lambda slot: (
                self.serving[slot],
                self.last_step(slot) > over,
                self._recency(slot),
            ),
        )
        reservation = Reservation(slot, self._names[slot])
        if reservation.displaced is not None:
            self._forget(reservation.displaced)
        self._reserved |= {slot}
        return reservation

    def idle_longest(self, staying: Collection[str]) -> str | None:
        """The adapter whose last step, or load, is longest ago; not a pinned one, nor one of
        ``staying``. None: there is none."""
        found = [
            (self._recency(slot), name)
            for slot, name in enumerate(self._names)
            if name is not None and name not in self._pinned and name not in staying
        ]
        return min(found)[1] if found else None

    def last_step(self, slot: int) -> int:
        """The last step that reads ``slot``, which may be written once that is over."""
        if self._uses:
            self._note_uses()
        return self._last_steps[slot]

    def adopt(self, slot: int, name: str) -> None:
        """``name`` serves from a free slot that holds it already. Raises ArgumentError if it serves
        from another."""
        if name in self._slot_of:
            raise ArgumentError(
                f"adapter {name!r} is in slots {self._slot_of[name]} and {slot}; load it under two "
                "names"
            )
        self._name(slot, name)

    def publish(self, reservation: Reservation, name: str) -> None:
        """``name`` serves from the reserved slot; a former version of it no longer does."""
        if name in self._slot_of:
            self._forget(name)
        self._reserved.remove(reservation.slot)
        self._loads += 1
        self._named_at[reservation.slot] = self.fence.enqueued, self._loads
        self._name(reservation.slot, name)

    def is_open(self, reservation: Reservation) -> bool:
        """Whether it was neither published nor ended in another way."""
        return reservation.slot in self._reserved

    def abandon(self, reservation: Reservation) -> None:
        """Something may have been written: nobody serves from the slot."""
        self._reserved.remove(reservation.slot)

    def unnamed_steps(self) -> tuple[int, ...]:
        """Last steps of slots that nobody serves from, where they are not over."""
        over = self.fence.finished()
        return tuple(
            self.last_step(slot)
            for slot in range(self.max_loras)
            if self._names[slot] is None and self.last_step(slot) > over
        )

    def give_back(self, reservation: Reservation) -> None:
        """Nothing was written: who was displaced serves again, unless loaded elsewhere since."""
        self._reserved.remove(reservation.slot)
        if reservation.displaced is not None and reservation.displaced not in self._slot_of:
            self._name(reservation.slot, reservation.displaced)

    def drop(self, name: str) -> None:
        """``name`` serves no more; its slot is free when the steps that read it are over."""
        self.require(name)
        self._forget(name)
        self._pinned.discard(name)

    def check_room(self, names: Sequence[str]) -> None:
        """Raise CapacityError, naming them, if so many adapters can never serve together."""
        distinct = list(dict.fromkeys(names))
        blocked = [name for name in self._pinned if name not in distinct]
        if len(distinct) + len(blocked) > self.max_loras:
            pinned = f" beside pinned {listed(map(shown, sorted(blocked)))}" if blocked else ""
            raise CapacityError(
                f"{counted(len(distinct), 'adapter')} wanted in one batch{pinned}, but there are "
                f"{counted(self.max_loras, 'slot')}: {', '.join(map(shown, distinct))}"
            )

    def _note_uses(self) -> None:
        for used, step in self._uses.items():
            for slot in slots_in(used):
                self._last_steps[slot] = max(self._last_steps[slot], step)
        self._uses.clear()

    def _recency(self, slot: int) -> tuple[int, int, int]:
        """Orders slots by the last step that read them; one loaded since counts as newer."""
        steps, loads = self._named_at[slot]
        last = self.last_step(slot)
        return (last, 0, 0) if last > steps else (steps, 1, loads)

    def _name(self, slot: int, name: str) -> None:
        own = slot_set((slot,))
        # An interrupt comes with a call, and there is none from here on.
        self._names[slot] = name
        self._slot_of[name] = slot
        self.serving[slot] = True
        self._vacant &= ~own

    def _forget(self, name: str) -> None:
        slot = self._slot_of[name]
        own = slot_set((slot,))
        # As above.
        del self._slot_of[name]
        self._names[slot] = None
        self.serving[slot] = False
        self._vacant |= own
