"""Which GPU architectures the kernels are built for, and which build a device runs.

A cubin runs on devices of its own major version with an equal or higher minor one, so one build per
generation is enough. ``sm_90a`` adds Hopper's own instructions to ``sm_90``.
"""

from __future__ import annotations

from cupylora.errors import ArgumentError, DeviceUnavailableError

__all__ = ["ARCHITECTURES", "arch_for", "architectures", "supports"]

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100", "sm_120")

_BY_MAJOR = {8: "sm_80", 9: "sm_90a", 10: "sm_100", 12: "sm_120"}


def arch_for(compute_capability: tuple[int, int]) -> str:
    """The build, such as ``"sm_90a"``, for a device of this (major, minor) compute capability.

    Raises DeviceUnavailableError for a capability that no build runs on.
    """
    arch = _BY_MAJOR.get(compute_capability[0])
    if arch is None:
        major, minor = compute_capability
        raise DeviceUnavailableError(
            f"compute capability {major}.{minor} is not supported: the kernels need 8.x, 9.x, "
            "10.x or 12.x (Ampere, Ada, Hopper or Blackwell); use the numpy backend"
        )
    return arch


def architectures(text: str) -> list[str]:
    """The builds of a comma-separated list, each once. Raises ArgumentError for an unknown one."""
    names = [name.strip() for name in text.split(",")]
    if not set(names) <= set(ARCHITECTURES):
        raise ArgumentError(f"--arch {text!r}: use {', '.join(ARCHITECTURES)}, by commas")
    return list(dict.fromkeys(names))


def supports(arch: str, min_arch: str) -> bool:
    """Whether a build for ``arch`` may hold a program that needs ``min_arch``."""
    return _number(arch) >= _number(min_arch)


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("af"))
