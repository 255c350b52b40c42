"""The emulator itself: what it makes of the sources' text, and that it sees each kind of fault."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import emulator
import numpy as np
import pytest
from emulator.build import Builder
from emulator.device import Device, EmulatorError, Schedule
from emulator.instructions import UnknownInstructionError, function_of
from emulator.rewrite import rewritten

from cupylora.compiler.programs import PROGRAMS
from cupylora.compiler.sources import KernelProgram
from cupylora.resources import cuda_source_dir


def _rewritten(text: str) -> str:
    return rewritten(text, itertools.count())


def test_shared_variables_become_references() -> None:
    assert _rewritten("__shared__ __align__(8) u64 a[2 * kN], b[3][4];  // two") == (
        "auto& a = emu::shared<u64[2 * kN]>(0); auto& b = emu::shared<u64[3][4]>(1);  "
    )
    assert _rewritten("extern __shared__ __align__(128) u8 room[];") == (
        "u8* const room = reinterpret_cast<u8*>(emu::dynamic_shared());"
    )


def test_asm_becomes_a_call_on_as_many_lines() -> None:
    operands = '"=r"(v.x), "=r"(v.y)\n : "r"(at(1, 2))'
    text = f'asm volatile("ld.shared.v2.u32 {{%0, %1}}, [%2];\\n"\n : {operands});'
    assert _rewritten(text) == "emu::ptx::load_shared8(v.x, v.y, at(1, 2))\n\n;"
    assert _rewritten('asm("bar.sync %0, %1;\\n" ::"r"(id), "r"(n) : "memory");') == (
        "emu::ptx::bar_sync(id, n);"
    )


def test_an_instruction_without_a_model_is_named() -> None:
    assert function_of("griddepcontrol.wait;\\n") == "wait_for_predecessor"
    with pytest.raises(UnknownInstructionError, match=r"red\.global\.add\.u32"):
        function_of("red.global.add.u32 [%0], %1;\\n")


@pytest.mark.emulated
def test_every_program_is_built(kernel_builder: Builder) -> None:
    kernel_builder.build(PROGRAMS)


EXPRESSIONS = (
    *("neighbour<true>", "neighbour<false>", "store_at<63>", "store_at<64>", "store_same"),
    *("store_high", "shared_overrun", "unset", "diverge", "half_barrier", "early"),
    *("after_the_one_ahead<true>", "after_the_one_ahead<false>", "copy_in<0>", "copy_in<1>"),
    *("bulk_in<true, 16>", "bulk_in<true, 32>", "bulk_in<true, 8>", "bulk_in<false, 16>"),
    *("bulk_over_stores", "push_to_other<true>", "push_to_other<false>"),
)
FAULTS = {
    "neighbour<false>": r"race: (read after write|write after read) at|read of unset shared memory",
    "unset": r"read of unset shared memory at cta 0 static\+0",
    "store_at<64>": "out of bounds, at byte 256 of the 256 bytes",
    "store_same": "written again after thread",
    "store_high": "misaligned 4 byte access",
    "shared_overrun": r"shared write of 4 bytes out of bounds at cta 0 static\+\d+",
    "diverge": "a diverged warp",
    "half_barrier": r"deadlock\n.*32 lanes of .* waits for bar.sync 0",
    "early": "may write, before griddepcontrol.wait",
    "after_the_one_ahead<false>": "launch_dependents before the wait",
    "copy_in<0>": "exits with cp.async under way",
    "bulk_in<true, 32>": r"deadlock\n.*bytes 16, 0 under way",
    "bulk_in<true, 8>": "8 bytes more than announced",
    "bulk_in<false, 16>": "arrive: there is no mbarrier",
    "bulk_over_stores": "without fence.proxy.async",
    "push_to_other<false>": "exits with asynchronous work on the way to it|which has exited",
}
DEPENDENT = ("early", "after_the_one_ahead<true>", "after_the_one_ahead<false>")
GRIDS = {"store_same": 2, "push_to_other<true>": 2, "push_to_other<false>": 2}
PASSING = [expression for expression in EXPRESSIONS if expression not in FAULTS]


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Device:
    """A device that knows one program, of the kernels above."""
    folder = tmp_path_factory.mktemp("probes")
    shutil.copytree(cuda_source_dir() / "ptx", folder / "ptx")
    shutil.copy(Path(emulator.__file__).parent / "probes.cu", folder)
    kernels = {expression: expression for expression in EXPRESSIONS}
    program = KernelProgram(name="probes", source="probes.cu", kernels=kernels)
    return Device(Builder(Path(folder)), find=lambda _: program)


def _run(device: Device, expression: str, *, writable: bool = True) -> np.ndarray:
    device.forget()
    words = device.array(np.arange(64, dtype=np.uint32), writable=writable)
    device.enqueue(
        "probes",
        expression,
        ("ptr",),
        (GRIDS.get(expression, 1),),
        32 if expression.startswith("store") else 64,
        (int(words.data.ptr),),
        dependent=expression in DEPENDENT,
        cluster=(2, 1, 1) if expression.startswith("push") else None,
    )
    return np.asarray(words.get())


@pytest.mark.emulated
@pytest.mark.parametrize("expression", FAULTS)
def test_each_kind_of_fault_is_seen(expression: str, probes: Device) -> None:
    for seed in range(3):
        probes.schedule = Schedule(seed, deliver=0, pause=100_000 * seed)
        with pytest.raises(EmulatorError, match=FAULTS[expression]):
            _run(probes, expression)


@pytest.mark.emulated
@pytest.mark.parametrize("expression", PASSING)
def test_what_is_in_order_passes(expression: str, probes: Device) -> None:
    for seed in range(5):
        probes.schedule = Schedule(seed, pause=100_000 * seed)
        _run(probes, expression)


@pytest.mark.emulated
def test_results_and_places(probes: Device) -> None:
    got = _run(probes, "neighbour<true>")
    np.testing.assert_array_equal(got, (np.arange(64) + 32) % 64)
    np.testing.assert_array_equal(_run(probes, "push_to_other<true>")[:2], [2, 2])
    with pytest.raises(EmulatorError, match=r"read-only .*\(probes\.cu:\d+\)"):
        _run(probes, "store_at<63>", writable=False)
    with pytest.raises(EmulatorError, match="its parameters are others"):
        probes.enqueue("probes", "store_same", ("ptr", "i32"), (1,), 32, (0, 0))
