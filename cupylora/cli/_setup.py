"""From the options of ``cupylora run`` to a stack that is ready to step.

In: RunOptions. Out: a RunSetup: backend, adapters in their slots, stack and batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cupylora.adapters.factors import Adapter, synthetic_adapter
from cupylora.adapters.peft import read_adapter
from cupylora.adapters.slots import BLOCK_ALIGNMENT, Arena, SlotTable, adapter_bytes
from cupylora.backend import ArrayBackend, open_backend
from cupylora.cli._named_folder import named_folder
from cupylora.cli._room import require_adapter_room
from cupylora.cli._trace import TraceStep, read_trace
from cupylora.dtypes import resolve_dtype
from cupylora.errors import ArgumentError
from cupylora.layers.batch import StackBatch, make_batch, mixed_slots
from cupylora.layers.stack import LayerStack, base_weight_bytes, require_base_room, require_room
from cupylora.resources import data_dir
from cupylora.shapes import MAX_LORAS, MAX_RANK, LoraLimits, ModelShape, load_model
from cupylora.text import byte_size, counted, shown

__all__ = ["RunOptions", "RunSetup", "Say", "prepare_run"]

_DEMO_MODEL = "tiny-moe"
_SYNTHETIC_DEFAULT, _RANK_DEFAULT = 4, "16"
_OTHER_PASSES = 5
"""Making the weights, the first step and the check cost a CPU about as much as so many steps."""
_LONG_READS = 10**10
"""Weights and factors, counted once a pass, that take a CPU about half a minute."""
_RANK_STEP = 16
_TRACE_SLOTS = 16

Say = Callable[[str], None]
"""Told what is being done now."""


@dataclass(frozen=True)
class RunOptions:
    """What the command line asks for; None: not said."""

    model: str = _DEMO_MODEL
    adapters: tuple[str, ...] = ()
    synthetic: int | None = None
    ranks: str | None = None
    layers: int | None = None
    tokens: int = 128
    steps: int = 10
    base_share: float = 0.25
    dtype: str = "bfloat16"
    seed: int = 0
    backend: str = "auto"
    max_loras: int | None = None
    lora_only: bool = False
    graphs: bool | None = None
    specialize_active_loras: bool = False
    buckets: str | None = None
    trace: str | None = None


@dataclass(frozen=True)
class RunSetup:
    """Everything a run works with.

    adapters: the one in each slot, cut to the stack's layers. known: those and all others that the
    trace names. trace: the steps to replay, if any. buckets: as asked for.
    """

    options: RunOptions
    backend: ArrayBackend
    model: ModelShape
    adapters: tuple[Adapter, ...]
    table: SlotTable
    stack: LayerStack
    batch: StackBatch
    known: Mapping[str, Adapter]
    trace: tuple[TraceStep, ...] = ()
    buckets: tuple[int, ...] | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of base weights, adapters and slot table."""
        adapters = self.table.arena.capacity + int(self.table.entries.nbytes)
        return self.stack.weight_bytes + adapters


def prepare_run(options: RunOptions, say: Say, note: Say = lambda _: None) -> RunSetup:
    """Make all of it. Raises a CupyloraError for whatever cannot be had, before much is done.

    note: told what is good to know before a long wait.
    """
    backend = open_backend(options.backend)
    dtype = resolve_dtype(options.dtype)
    trace = () if options.trace is None else tuple(read_trace(Path(options.trace)))
    if options.graphs is None:
        options = replace(options, graphs=backend.on_device or bool(trace))
    buckets = _buckets(options, trace)
    wanted = _wanted(options, trace)
    whole = load_model(options.model)
    model = whole if options.layers is None else _cut(whole, options.layers)
    base_bytes = 0 if options.lora_only else base_weight_bytes(model, dtype)
    if base_bytes:
        require_base_room(model, dtype, backend)
    folders = (folder for _, folder in wanted.named)
    ranks = [rank for _, rank in wanted.synthetic]
    require_adapter_room(backend, model, folders, ranks, dtype.itemsize, base_bytes)
    slots = _max_loras(options, len(wanted.named) + len(wanted.synthetic), trace)
    _check_trace(options, wanted, trace, slots)
    known = _adapters(wanted, options, whole, model, say)
    adapters = known[:slots]
    if not backend.on_device and (hint := _long_run(options, model, adapters)):
        note(hint)
    say("loading adapters into slots")
    table = _load(known, slots, options, model, dtype, backend, trace)
    given = options.lora_only or model.moe is None
    say("preparing layers" if given else "making base weights")
    stack = LayerStack(
        table,
        backend,
        max_tokens=_largest_step(options, trace),
        lora_only=options.lora_only,
        seed=options.seed,
    )
    mix = mixed_slots(options.tokens, len(adapters), options.base_share, options.seed)
    batch = make_batch(model, backend, mix, dtype=dtype, seed=options.seed)
    by_name = {adapter.name: adapter for adapter in known}
    return RunSetup(options, backend, model, adapters, table, stack, batch, by_name, trace, buckets)


def _cut(model: ModelShape, layers: int) -> ModelShape:
    if layers > model.layers:
        raise ArgumentError(f"--layers is {layers}; model {shown(model.name)} has {model.layers}")
    return model.with_layers(layers)


def _long_run(options: RunOptions, model: ModelShape, adapters: Sequence[Adapter]) -> str | None:
    """What a CPU has to do, in a line, if that takes long."""
    size = resolve_dtype(options.dtype).itemsize
    base = 0 if options.lora_only else base_weight_bytes(model, options.dtype)
    factors = size * sum(adapter.parameters for adapter in adapters)
    if (base + factors) // size * (options.steps + _OTHER_PASSES) < _LONG_READS:
        return None
    weights = f"{byte_size(base)} of base weights and " if base else ""
    remedy = ""
    if model.layers > 1:
        remedy = "; --layers 1 is enough to see it work"
    elif options.steps > 1:
        remedy = "; --steps 1 is quicker"
    return (
        f"{counted(options.steps, 'step')} through {counted(model.layers, 'layer')} with {weights}"
        f"{byte_size(factors)} of adapters take a while on the CPU{remedy}"
    )


@dataclass(frozen=True)
class _Wanted:
    """named: (name, directory) of adapters in files. synthetic: (name, rank) of random ones."""

    named: tuple[tuple[str, str], ...]
    synthetic: tuple[tuple[str, int], ...]


def _wanted(options: RunOptions, trace: Sequence[TraceStep]) -> _Wanted:
    """Which adapters are asked for: the options', and random ones of the trace's other names.

    Raises ArgumentError if they have not a slot each, but for a trace, which loads them in turn.
    """
    named = [named_folder(text, "--adapter") for text in options.adapters]
    synthetic = options.synthetic
    if not named and synthetic is None and not trace:
        if options.model == _DEMO_MODEL:
            named = [(path.name, str(path)) for path in sorted((data_dir() / "demo").iterdir())]
        else:
            synthetic = _SYNTHETIC_DEFAULT
    names = [name for name, _ in named]
    for name, path in named:
        if names.count(name) > 1:
            raise ArgumentError(
                f"--adapter {path}: the name {name!r} is given twice; name one of them otherwise "
                "with NAME=DIR"
            )
    ranks = _ranks(_RANK_DEFAULT if options.ranks is None else options.ranks)
    random = [f"synthetic-{n}-r{ranks[n % len(ranks)]}" for n in range(synthetic or 0)]
    if trace:
        used = dict.fromkeys(name for step in trace for name in (*step.load, *step.names))
        random += [name for name in used if name not in {*names, *random}]
    else:
        _check_slots(len(named) + len(random), options.max_loras)
    if options.ranks is not None and not random:
        raise ArgumentError(
            f"--rank {options.ranks} is for random adapters, and there are none; add "
            "--synthetic-adapters N"
        )
    chosen = ((name, ranks[number % len(ranks)]) for number, name in enumerate(random))
    return _Wanted(tuple(named), tuple(chosen))


def _check_slots(count: int, max_loras: int | None) -> None:
    """``count`` adapters have a slot each."""
    if max_loras is not None and count > max_loras:
        raise ArgumentError(
            f"{counted(count, 'adapter')} do not fit --max-loras {max_loras}; raise it or "
            "give fewer adapters"
        )
    if count > MAX_LORAS:
        raise ArgumentError(
            f"{counted(count, 'adapter')} do not fit the {MAX_LORAS} slots that a table can have; "
            "give fewer adapters"
        )


def _max_loras(options: RunOptions, known: int, trace: Sequence[TraceStep]) -> int:
    """Slots: as said, else one an adapter, but for a trace no more than a server would have."""
    if options.max_loras is not None:
        return options.max_loras
    return max(1, min(known, _TRACE_SLOTS) if trace else known)


def _largest_step(options: RunOptions, trace: Sequence[TraceStep]) -> int:
    return max([options.tokens, *(step.num_tokens for step in trace)])


def _check_trace(
    options: RunOptions, wanted: _Wanted, trace: Sequence[TraceStep], slots: int
) -> None:
    """Raise ArgumentError for a step that no server of so many slots could serve."""
    names = {name for name, _ in (*wanted.named, *wanted.synthetic)}
    for step in trace:
        where = f"--trace {options.trace}, step {step.step}"
        if len(step.names) > slots:
            raise ArgumentError(
                f"{where} has requests of {counted(len(step.names), 'adapter')}, but there are "
                f"{counted(slots, 'slot')}; raise --max-loras"
            )
        unknown = [name for name in step.unload if name not in names]
        if unknown:
            raise ArgumentError(
                f"{where} unloads {shown(unknown[0])}, which no request and no --adapter names"
            )


def _buckets(options: RunOptions, trace: Sequence[TraceStep]) -> tuple[int, ...] | None:
    """--buckets as numbers. Raises ArgumentError for what cannot be, and without graphs."""
    for given, option in (
        (options.buckets is not None, "--buckets"),
        (options.specialize_active_loras, "--specialize-active-loras"),
    ):
        if given and not options.graphs:
            raise ArgumentError(f"{option} needs --graphs or --trace")
    if options.buckets is None:
        return None
    most = _largest_step(options, trace)
    parts = [part.strip() for part in options.buckets.split(",")]
    good = all(part.isdecimal() and len(part) < 9 and 1 <= int(part) <= most for part in parts)
    numbers = [int(part) for part in parts] if good else []
    if not good or sorted(set(numbers)) != numbers:
        raise ArgumentError(
            f"--buckets {options.buckets!r}: rising numbers of tokens from 1 to {most} (the "
            "largest step), by commas, are needed"
        )
    return tuple(numbers)


def _adapters(
    wanted: _Wanted, options: RunOptions, whole: ModelShape, model: ModelShape, say: Say
) -> tuple[Adapter, ...]:
    """Adapters read from directories, then synthetic ones.

    A file is read against the whole model, so that each of its tensors is accounted for.
    """
    adapters = []
    for name, path in wanted.named:
        say(f"reading adapter {shown(name)}")
        adapters.append(read_adapter(path, whole, name=name).with_layers(model.layers))
    if wanted.synthetic:
        say(f"making {counted(len(wanted.synthetic), 'synthetic adapter')}")
    dtype = resolve_dtype(options.dtype)
    for number, (name, rank) in enumerate(wanted.synthetic):
        adapters.append(synthetic_adapter(model, rank, options.seed + number, dtype, name=name))
    return tuple(adapters)


def _ranks(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    short = all(part.isdecimal() and len(part) <= len(str(MAX_RANK)) for part in parts)
    if not short or not all(1 <= int(part) <= MAX_RANK for part in parts):
        raise ArgumentError(f"--rank {text!r}: ranks of 1 to {MAX_RANK}, by commas, are needed")
    return [int(part) for part in parts]


def _load(
    known: Sequence[Adapter],
    max_loras: int,
    options: RunOptions,
    model: ModelShape,
    dtype: Any,
    backend: ArrayBackend,
    trace: Sequence[TraceStep],
) -> SlotTable:
    """A table just large enough, with the first adapters in slots 0, 1, ...

    For a trace there is room for any adapters in all slots, and one to come before one goes.
    """
    largest = max((adapter.max_rank for adapter in known), default=1)
    max_rank = -(-largest // _RANK_STEP) * _RANK_STEP
    sizes = sorted((adapter_bytes(adapter, dtype.itemsize) for adapter in known), reverse=True)
    size = (max_loras + 1) * sizes[0] if trace and sizes else sum(sizes)
    base = 0 if options.lora_only else base_weight_bytes(model, dtype)
    require_room(
        backend,
        base + size,
        counted(len(known), "adapter") + (" and the base expert weights" if base else ""),
        f"use {'--lora-only, ' if base else ''}fewer layers, fewer adapters or smaller ranks",
    )
    arena = Arena(max(size, BLOCK_ALIGNMENT), backend.xp)
    limits = LoraLimits(max_loras=max_loras, max_rank=min(max_rank, MAX_RANK))
    table = SlotTable(model, limits, dtype, xp=backend.xp, arena=arena)
    for slot, adapter in enumerate(known[:max_loras]):
        table.load(slot, adapter)
    return table
