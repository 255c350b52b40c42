"""Adapter files, read without torch: a PEFT directory or Kohya's file in, an :class:`Adapter` out.

Flow: ``peft_config`` and ``safetensors_file`` read and check the two files; ``assembly`` plans from
the headers which tensor is applied where (``open_adapter``); then the data is read, and each
:class:`Unit` of the plan builds its factors. A tensor that finds no place refuses the whole
adapter, with the list of what would be lost. ``inspection`` goes the same way without the last
step; ``importing`` does that step on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.adapters.assembly import (
    Placed,
    check_placed,
    pair_up,
    plan_units,
    raise_it,
    tensors_by_place,
)
from cupylora.adapters.factors import Adapter, LoraFactors, check_rank
from cupylora.adapters.peft_config import CONFIG_FILE, PeftConfig, no_config, read_config
from cupylora.adapters.safetensors_file import SUFFIX, WeightFiles, open_weights
from cupylora.adapters.units import Unit, check_finite
from cupylora.errors import AdapterFormatError, ArgumentError
from cupylora.files import is_there, named, reason
from cupylora.shapes import LoraLimits, ModelShape
from cupylora.text import quoted, shown

__all__ = [
    "OpenAdapter",
    "adapter_path",
    "check_ranks",
    "config_for",
    "has_config",
    "open_adapter",
    "read_adapter",
    "same_bytes",
]

Array = npt.NDArray[Any]


def read_adapter(
    path: str | Path,
    model: ModelShape,
    *,
    name: str | None = None,
    limits: LoraLimits | None = None,
) -> Adapter:
    """Read the adapter at ``path`` for ``model``; ``name`` defaults to the path's last part.

    path: a PEFT directory (adapter_config.json with adapter_model.safetensors or its shards), or a
    .safetensors file whose tensors are named as Kohya's scripts do (lora_down, lora_up, alpha).
    Every tensor is applied exactly once, or AdapterFormatError lists what would be lost. It is also
    raised for malformed files, shapes that do not fit the model, ranks other than the config's,
    values that are not finite, and settings that cannot be applied (DoRA, biases, modules_to_save,
    ...); ArgumentError for a ``path`` that is none. limits: refuses a rank beyond its max_rank
    (CapacityError) before any data is read.
    """
    with open_adapter(path, model) as opened:
        if limits is not None:
            check_ranks(name or opened.name, opened.units, limits)
        tensors = opened.weights.read()
        for unit in opened.units:
            _check_values(unit, tensors)
        factors = {key: value for unit in opened.units for key, value in _built(unit, tensors)}
    return Adapter(name or opened.name, _sharing_gate_and_up(factors), opened.source)


@dataclass(frozen=True, eq=False)
class OpenAdapter:
    """An adapter whose files are open and whose headers are judged; no data is read yet.

    name: the path's last part. source: the path.
    """

    name: str
    source: str
    weights: WeightFiles
    units: Sequence[Unit]


@contextmanager
def open_adapter(path: str | Path, model: ModelShape) -> Iterator[OpenAdapter]:
    """Open the adapter at ``path`` for ``model``. Raises as ``read_adapter`` does for all that the
    headers and the config can show; an AdapterFormatError from inside begins with the path."""
    place = adapter_path(path)
    with _within(place):
        config = read_config(place / CONFIG_FILE) if has_config(place) else None
        with open_weights(place) as weights:
            placed = tensors_by_place(weights.tensors, model)
            check_placed(placed, model, config.base_model if config else None, raise_it)
            config = config or config_for(place, placed)
            pairs = pair_up(placed, weights.tensors, weights.scalar, model, config)
            own = place.name if place.is_dir() else place.stem
            yield OpenAdapter(own, str(place), weights, plan_units(pairs, model, config))


def check_ranks(name: str, units: Iterable[Unit], limits: LoraLimits) -> None:
    """Raise CapacityError for a rank of adapter ``name`` beyond ``limits.max_rank``."""
    for unit in units:
        where = f"adapter {shown(name)}, layer {unit.layer}, {unit.modules[0]}"
        check_rank(where, unit.rank, limits)


def adapter_path(path: str | Path) -> Path:
    """``path`` as a Path that can be looked into: a directory, or a .safetensors file.

    Raises ArgumentError for another type, AdapterFormatError where there is neither.
    """
    if not isinstance(path, str | Path):
        raise ArgumentError(f"path is {quoted(path)}; an adapter's directory is needed")
    place = Path(path)
    try:
        found = place.is_dir() or (place.suffix == SUFFIX and place.exists())
        other = not found and place.exists()
    except (OSError, ValueError) as error:
        raise AdapterFormatError(
            f"{shown(str(path))}: cannot be looked into ({reason(error)}); give a directory that "
            "can be read"
        ) from error
    if not found:
        what = f"no directory and no {SUFFIX} file" if other else "no such directory"
        raise AdapterFormatError(f"{shown(str(path))}: {what}; a PEFT adapter is a directory")
    return place


def has_config(place: Path) -> bool:
    """Whether an adapter_config.json belongs to the adapter at ``place``."""
    return is_there(place / CONFIG_FILE)


def config_for(place: Path, placed: Placed) -> PeftConfig:
    """What stands for adapter_config.json where there is none: nothing, in Kohya's files.

    Raises AdapterFormatError for tensors named as peft does, whose scale would be unknown.
    """
    if placed.kohya:
        return no_config(place)
    raise AdapterFormatError(
        f"{named(place)}: its tensors are named as peft names them, so their scale stands in an "
        f"{CONFIG_FILE}, which is not there; give the directory that has both"
    )


@contextmanager
def _within(place: Path) -> Iterator[None]:
    """Let an AdapterFormatError that names no file begin with the adapter's path."""
    try:
        yield
    except AdapterFormatError as error:
        where = named(place)
        if str(error).startswith(where):
            raise
        raise AdapterFormatError(f"{where}: {error}") from error


def _check_values(unit: Unit, tensors: Mapping[str, Array]) -> None:
    for pair in unit.pairs:
        for name in (pair.a_name, pair.b_name):
            check_finite(name, tensors[name].shape, [tensors[name].reshape(-1)])


_Key = tuple[int, str]


def _built(unit: Unit, tensors: Mapping[str, Array]) -> Iterable[tuple[_Key, LoraFactors]]:
    """The unit's factors by (layer, module), one A for all of them."""
    a, b = unit.build(tensors)
    for module, rows in unit.group.splits:
        yield (unit.layer, module), LoraFactors(a, b[:, rows], unit.scale)


def _sharing_gate_and_up(factors: dict[_Key, LoraFactors]) -> dict[_Key, LoraFactors]:
    """One A for gate and up also where a file repeats it, so that form does not cost memory."""
    for (layer, module), up in list(factors.items()):
        gate = factors.get((layer, "gate_proj"))
        if module == "up_proj" and gate and gate.a is not up.a and same_bytes(gate.a, up.a):
            factors[layer, module] = LoraFactors(gate.a, up.b, up.scale)
    return factors


def same_bytes(a: Array, b: Array) -> bool:
    """Whether two arrays hold the same bytes, with the same dtype and shape."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = np.dtype(f"u{a.itemsize}")
    return np.array_equal(np.ascontiguousarray(a).view(bits), np.ascontiguousarray(b).view(bits))
