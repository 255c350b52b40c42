"""The bench on a device: every kind of point, the command from end to end, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_util import small
from click.testing import CliRunner

from cupylora import ops
from cupylora.backend import CudaBackend
from cupylora.bench import calls
from cupylora.bench.check import OffReferenceError
from cupylora.bench.measure import GraphMeasurer
from cupylora.bench.record import read_record
from cupylora.bench.stream import ReadStream
from cupylora.bench.timing import CudaGraphs
from cupylora.cli import main

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def measurer() -> GraphMeasurer:
    backend = CudaBackend()
    graphs = CudaGraphs(backend)
    with graphs.active():
        return GraphMeasurer(backend, graphs, ReadStream(backend, graphs, 132), 4e12, sets=5)


@pytest.mark.parametrize("kind", ["dense", "moe", "route", "moe step", "dense step"])
@pytest.mark.parametrize(("tokens", "active"), [(1, 1), (12, 3), (200, 4)])
def test_every_kind_of_point(kind: str, tokens: int, active: int, measurer: GraphMeasurer) -> None:
    measured = measurer.measure(small(kind, tokens=tokens, active=active))
    assert 0.3 < measured.us < 1000
    assert 0 <= measured.spread < 3
    assert measured.stream_us > 0.5 * len(measured.parts_us)
    assert measured.error < 6e-3
    assert (measured.error > 0) == (kind != "route")


def test_wrong_outputs_are_refused(
    measurer: GraphMeasurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(x: Any, y: Any, *args: Any, **kwargs: Any) -> None:
        ops.lora_delta(x, y, *args, **kwargs)
        y.view(np.uint16)[:1].fill(0)

    with monkeypatch.context() as context:
        context.setattr(calls, "lora_delta", broken)
        with pytest.raises(OffReferenceError):
            measurer.measure(small("dense"))
    assert measurer.usable()
    measurer.measure(small("dense"))


def test_the_command(tmp_path: Path) -> None:
    sizes = ("--rank", "8", "--tokens", "4", "--active", "2", "--max-loras", "4")
    arguments = ["bench", "--model", "tiny-moe", *sizes, "--json", str(tmp_path / "r.json")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    record = read_record(tmp_path / "r.json")
    (row,) = record.rows
    assert (row.model, row.rank, row.tokens, row.active, row.sets) == ("tiny-moe", 8, 4, 2, 128)
    assert row.us is not None
    assert row.us == pytest.approx(sum(row.parts_us), rel=1e-3)
    assert 0 < (row.floor_us or 0) < row.us
    assert row.checked == "all 8 rows of gate and up, and of down, of the first and the last set"
    assert record.copy_bytes_per_second is not None
    assert record.copy_bytes_per_second > 1e11
    assert record.device in result.stdout
