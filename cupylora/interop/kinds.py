"""Whether an argument is an array of our own, or one that has to be looked through.

Every public call asks this of every argument, so that for arrays of our own it costs one look-up of
their type. In: any value. Out: whether nothing in it needs conversion; lists, tuples and bundles of
arrays are looked into, a bundle once in its life.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from cupylora.interop.layout import home_of
from cupylora.interop.view import ArrayView
from cupylora.worklists import ArrayBundle

__all__ = ["OWN_TYPES", "all_own", "is_foreign", "is_own", "offers"]

OWN_TYPES: set[type] = {np.ndarray, int, float, bool, str, type(None)}
"""Types whose instances are never converted, found so far. They may be added to, never removed."""

_SEEN = "_holds_own_arrays"
"""Set in a bundle's dict once its arrays were found to be ours: a frozen bundle stays so."""

_BUNDLES: set[type] = set()
"""Types of bundles that were looked into so far."""

_FOREIGN: set[type] = {ArrayView}
"""Types of other libraries' arrays found so far."""

_SEQUENCES = (list, tuple)
_PROTOCOLS = ("__dlpack__", "__cuda_array_interface__")


def all_own(values: Iterable[Any]) -> bool:
    """Whether none of ``values`` needs conversion."""
    for value in values:
        kind = type(value)
        if kind in OWN_TYPES or (kind in _BUNDLES and _SEEN in value.__dict__):
            continue
        if not (all_own(value) if kind is list or kind is tuple else _look_into(value)):
            return False
    return True


def is_own(value: Any) -> bool:
    """Whether ``value`` needs no conversion; this says nothing about its fitting."""
    return type(value) in OWN_TYPES or _look_into(value)


def is_foreign(value: Any) -> bool:
    """Whether ``value`` is one array of another library, or an ArrayView."""
    kind = type(value)
    if kind in _FOREIGN:
        return True
    if kind in OWN_TYPES or isinstance(value, type) or _is_native(value):
        return False
    if any(hasattr(kind, protocol) for protocol in _PROTOCOLS):
        _FOREIGN.add(kind)
        return True
    return any(offers(value, protocol) for protocol in _PROTOCOLS)


def offers(value: Any, protocol: str) -> bool:
    """Whether ``value`` has what a protocol asks for."""
    try:
        return hasattr(value, protocol)
    except Exception:  # the value's own code
        return False


def _look_into(value: Any) -> bool:
    if type(value) in _FOREIGN:
        return False
    if isinstance(value, ArrayBundle):
        return _bundle_is_own(value)
    if isinstance(value, _SEQUENCES):
        return all_own(value)
    if is_foreign(value):
        return False
    # An instance of any other class might still bring a protocol of its own.
    kind = type(value)
    if _is_native(value) or home_of(kind) in ("builtins", "cupylora", "numpy"):
        OWN_TYPES.add(kind)
    return True


def _bundle_is_own(bundle: ArrayBundle) -> bool:
    content = vars(bundle)
    own = _SEEN in content or all_own(content.values())
    if own:
        _BUNDLES.add(type(bundle))
        content[_SEEN] = True
    return own


def _is_native(value: Any) -> bool:
    """NumPy's and CuPy's arrays. CuPy is imported by whoever has such an array."""
    if isinstance(value, np.ndarray | np.generic):
        return True
    device_array = getattr(sys.modules.get("cupy"), "ndarray", None)
    return device_array is not None and isinstance(value, device_array)
