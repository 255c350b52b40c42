"""Which tests run where: ``gpu`` tests need a ready device, ``nvrtc`` tests the compiler,
``emulated`` tests g++.

Without a device ``gpu`` tests are skipped, saying why. With ``--require-gpu`` they fail instead,
and a run that executed no GPU test at all fails too: a green run then proves a GPU was used.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import pytest
from emulator.build import Builder, missing_tools
from emulator.device import Device

from cupylora.compiler.nvrtc import compiler_version
from cupylora.compiler.programs import find_program
from cupylora.device import DeviceInfo, DeviceState, probe
from cupylora.errors import CompileError
from cupylora.resources import cuda_source_dir

# JAX would take most of the device's memory at its start, in each of the processes that run tests.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

GPU_TESTS_RUN = pytest.StashKey[int]()
_GPU_MARKERS = ("gpu", "multi_gpu")

device = functools.cache(probe)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail gpu tests where there is no ready device, and a run without any gpu test",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[GPU_TESTS_RUN] = 0
    config.pluginmanager.register(_GpuTestCounter(config))


def pytest_report_header(config: pytest.Config) -> str:
    info = device()
    return f"cuda backend: {info.state.value}: {info.detail}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _needs_gpu(item):
        _require_device(item, device())
    if item.get_closest_marker("nvrtc") is not None:
        try:
            compiler_version()
        except CompileError as error:
            pytest.skip(str(error))
    if item.get_closest_marker("emulated") is not None and (lacking := missing_tools()):
        pytest.skip(lacking)


@pytest.fixture(scope="session")
def kernel_builder() -> Builder:
    return Builder(cuda_source_dir())


@pytest.fixture
def emulated(request: pytest.FixtureRequest, kernel_builder: Builder) -> Iterator[Device]:
    """A device without a GPU for the ops, its kernels built: those of the module's PROGRAMS."""
    kernel_builder.build(map(find_program, request.module.PROGRAMS))
    with Device(kernel_builder).installed() as device:
        yield device


class _GpuTestCounter:
    """Counts by reports, which reach the main process from parallel workers too."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        marked = any(name in report.keywords for name in _GPU_MARKERS)
        if marked and report.when == "call" and not report.skipped:
            self.config.stash[GPU_TESTS_RUN] += 1


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _ran_no_gpu_test(session.config) and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if _ran_no_gpu_test(config):
        terminalreporter.write_line("--require-gpu: no gpu test ran", red=True)


def _needs_gpu(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in _GPU_MARKERS)


def _require_device(item: pytest.Item, info: DeviceInfo) -> None:
    if info.state is not DeviceState.READY:
        reason = f"needs a GPU; {info.state.value}: {info.detail}"
        if item.config.getoption("--require-gpu"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    if item.get_closest_marker("multi_gpu") is not None and info.device_count < 2:
        pytest.skip(f"needs two GPUs; there is {info.device_count}")


def _ran_no_gpu_test(config: pytest.Config) -> bool:
    if hasattr(config, "workerinput"):
        return False
    return bool(config.getoption("--require-gpu")) and config.stash[GPU_TESTS_RUN] == 0
