"""The example hosts of ``tools/hosts``, each where its stack is installed; Triton's on a stub."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_util import BACKENDS, jax_on
from dlpack_producer import Producer

from cupylora.backend import ArrayBackend, open_backend
from cupylora.dtypes import BFLOAT16

HOSTS = Path(__file__).parent.parent / "tools" / "hosts"


@pytest.fixture(autouse=True)
def _hosts_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HOSTS))


def test_no_host_takes_the_name_of_a_package_that_it_uses() -> None:
    """Python looks beside a script first: numba finds its CUDA target by the name numba_cuda."""
    packages = {"cupy", "jax", "numba", "numba_cuda", "torch", "triton_python_backend_utils"}
    assert packages.isdisjoint(path.stem for path in HOSTS.rglob("*.py"))


def test_a_host_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numba_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ImportError, match=r"needs numba-cuda beside CuPy: pip install"):
        importlib.import_module("numba_kernels")


def test_a_host_says_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("numba_kernels", "numba", "numba.cuda"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").touch()
    (tmp_path / "numba" / "cuda.py").write_text("import numpy\nnumpy.no_such_function\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=r"installed, but cannot .* NumPy .*no_such_function"):
        importlib.import_module("numba_kernels")
    for name in ("numba", "numba.cuda"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("name", BACKENDS)
def test_cupy_alone(name: str) -> None:
    host, here = importlib.import_module("cupy_alone"), open_backend(name)
    x, y = here.xp.ones((4, 64), "float16"), here.xp.full((4, 128), 2, "float16")
    host.add_deltas(here, x, y)
    here.synchronize()
    rows = here.to_host(y)
    assert (rows[[1, 3]] == 2).all()
    assert (rows[0] == rows[2]).all()
    assert np.abs(rows[0].astype(np.float32) - 2).max() > 0.1


_NUMBA_PROBE = """
from numba import cuda

assert cuda.is_available(), "it finds no CUDA device, or no NVVM"
cuda.jit("void(int32[:])")(lambda array: None)
"""


def _numba_lacks() -> str:
    """Why numba-cuda cannot compile here, or nothing. It may import beside a NumPy that it does not
    fit, and fail at its first kernel."""
    probe = subprocess.run(
        [sys.executable, "-c", _NUMBA_PROBE], capture_output=True, text=True, check=False
    )
    return "" if probe.returncode == 0 else probe.stderr.strip().splitlines()[-1]


@pytest.mark.gpu
def test_numba_kernels() -> None:
    if lacking := _numba_lacks():
        pytest.skip(f"needs a numba-cuda that compiles: {lacking}")
    numba = importlib.import_module("numba.cuda")
    host = importlib.import_module("numba_kernels")
    stream = numba.stream()
    rows = host.step(stream).copy_to_host(stream=stream)
    assert (rows[[1, 3]] == 0).all()
    assert (rows[0] == rows[2]).all()
    assert np.abs(rows[0].astype(np.float32)).max() > 0.1


# --- JAX -----------------------------------------------------------------------------------------


@pytest.fixture(params=BACKENDS)
def here(request: pytest.FixtureRequest) -> Iterator[ArrayBackend]:
    """A backend, JAX working on its device."""
    with jax_on("gpu" if request.param == "cuda" else "cpu"):
        yield open_backend(request.param)


@pytest.fixture
def jax_host(here: ArrayBackend) -> Any:
    return importlib.import_module("jax_moe")


def _block(host: Any, here: ArrayBackend, adapters: int) -> Any:
    """A layer of the host, and what it is given."""
    import jax

    model = host.load_model("tiny-moe")
    limits, arena = host.LoraLimits(max_loras=4, max_rank=16), host.Arena(1 << 20, here.xp)
    table = host.SlotTable(model, limits, BFLOAT16, xp=here.xp, arena=arena)
    for slot, name in zip(range(adapters), ("contracts-r8", "legal-stacked-r6"), strict=False):
        host.load_adapter(host.data_dir() / "demo" / name, table, slot=slot)
    layer = host.JaxMoeLayer(here, model, table, max_tokens=8)
    rng = np.random.default_rng(11)

    def values(*shape: int) -> Any:
        return jax.numpy.asarray(rng.standard_normal(shape) / shape[-1] ** 0.5, BFLOAT16)

    base = values(8, 96, 64), values(8, 64, 48)
    ids = np.stack([rng.permutation(8)[:2] for _ in range(8)]).astype(np.int32)
    scores = rng.random((8, 2), np.float32)
    return layer, table, values(8, 64), jax.numpy.asarray(ids), scores, base


def test_jax_layers_have_deltas_between_their_gemms(jax_host: Any, here: ArrayBackend) -> None:
    """As our whole block computes it, up to what each rounds."""
    import jax
    from backend_util import moe_layer

    from cupylora.layers.moe import MoeWeights

    layer, table, x, ids, scores, base = _block(jax_host, here, 2)
    slots = np.array([0, -1, 1, 0, 1, -1, 0, 1], np.int32)
    got = layer(x, ids, jax.numpy.asarray(scores), jax.numpy.asarray(slots), base)
    assert isinstance(got, jax.Array)
    assert got.dtype == BFLOAT16
    block, plan = moe_layer(here, table, max_tokens=8)
    weights = MoeWeights(*base)
    put = here.asarray
    want = here.to_host(block.forward(x, ids, put(scores), put(slots), weights, plan))
    without = layer(x, ids, jax.numpy.asarray(scores), jax.numpy.full(8, -1, "int32"), base)
    got, want, without = (np.asarray(a).astype(np.float32) for a in (got, want, without))
    assert np.abs(got - want).max() < 0.02 * np.abs(want).max()
    changed = np.abs(got - without).max(axis=1) > 0.05 * np.abs(want).max()
    assert changed.tolist() == (slots >= 0).tolist()


def test_nothing_is_copied_between_jax_and_us(jax_host: Any, here: ArrayBackend) -> None:
    import jax

    from cupylora.errors import ArgumentError

    layer, _, x, *_ = _block(jax_host, here, 1)
    assert here.address(here.view(x)) == x.unsafe_buffer_pointer()
    mine = jax_host.own_array(here, (8, 64), BFLOAT16)
    assert jax_host.to_jax(mine).unsafe_buffer_pointer() == here.address(mine)
    layer.plan.update(here.zeros(8, np.int32), here.zeros((8, 2), np.int32))
    hidden, base = (jax.numpy.zeros((16, width), BFLOAT16) for width in (48, 64))
    with pytest.raises(ArgumentError, match=r"y is an array of jax.*, which may not be written"):
        layer.lora.add_down(hidden, base, layer.plan)


def test_what_jax_still_computes_is_waited_for(here: ArrayBackend) -> None:
    import jax

    @jax.jit
    def slow(x: Any) -> Any:
        for _ in range(20):
            x = x @ x / 1024
        return x + 1

    x = jax.numpy.ones((1024, 1024), "float32")
    slow(x).block_until_ready()  # compiled
    pending = slow(x * 1)
    assert (here.to_host(here.view(pending)) == 2).all()


# --- Triton --------------------------------------------------------------------------------------


class _Tensor:
    """The server's tensor, as far as its documentation describes one."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array

    def is_cpu(self) -> bool:
        return True

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def __dlpack__(self, stream: Any = None) -> Any:
        return Producer(self._array).export(versioned=False)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@dataclass
class _Response:
    output_tensors: list[_Tensor] = field(default_factory=list)
    error: Any = None


@dataclass
class _Error:
    message: str


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model of the example, as the server makes it on a CPU."""
    stub: Any = types.ModuleType("triton_python_backend_utils")
    stub.Tensor, stub.InferenceResponse, stub.TritonError = _Tensor, _Response, _Error
    stub.get_input_tensor_by_name = lambda request, name: request[name]
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    path = HOSTS / "triton" / "moe_lora" / "1" / "model.py"
    spec = importlib.util.spec_from_file_location("triton_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    config = {"parameters": _parameters()}
    model.initialize({"model_config": json.dumps(config), "model_instance_kind": "CPU"})
    yield model
    model.finalize()


def _parameters() -> dict[str, Any]:
    text = (HOSTS / "triton" / "moe_lora" / "config.pbtxt").read_text()
    found = re.findall(r'key: "(\w+)"\s+value: \{ string_value: "([^"]*)" \}', text)
    return {key: {"string_value": value} for key, value in found}


def _request(adapter: str, tokens: int, seed: int, **changes: np.ndarray) -> dict[str, _Tensor]:
    rng = np.random.default_rng(seed)
    arrays = {
        "x": rng.standard_normal((tokens, 64)).astype(np.float16),
        "y": rng.standard_normal((tokens, 128)).astype(np.float16),
        "adapter": np.array([adapter.encode()], np.object_),
        **changes,
    }
    return {name: _Tensor(name, array) for name, array in arrays.items()}


def _y(response: _Response) -> np.ndarray:
    assert response.error is None, response.error.message
    (tensor,) = response.output_tensors
    assert tensor.name() == "out"
    return tensor.as_numpy()


def test_triton_serves_requests_of_many_adapters_in_one_step(triton: Any) -> None:
    names = ("contracts-r8", "", "legal-stacked-r6", "support-rslora-r4")
    requests = [_request(name, 3 + seed, seed) for seed, name in enumerate(names)]
    given = [request["y"].as_numpy().copy() for request in requests]
    together = [_y(response) for response in triton.execute(requests)]
    assert triton.runtime.counts().tokens == sum(map(len, given)), "one step for all"
    alone = [_y(triton.execute([request])[0]) for request in requests]
    for name, before, got, apart in zip(names, given, together, alone, strict=True):
        assert got.tobytes() == apart.tobytes()
        assert (got.tobytes() == before.tobytes()) == (name == "")
    assert [request["y"].as_numpy().tobytes() for request in requests] == [
        array.tobytes() for array in given
    ], "the server's tensors stay as they were"


def test_one_requests_error_is_its_own(triton: Any) -> None:
    good = _request("contracts-r8", 4, 1)
    (expected,) = map(_y, triton.execute([good]))
    wide = _request("", 2, 3, x=np.zeros((2, 65), np.float16))
    responses = triton.execute(
        [
            good,
            _request("nobody", 2, 2),
            _request("", 2, 3, y=np.zeros((3, 128), np.float16)),
            _request("", 513, 4),
        ]
    )
    assert _y(responses[0]).tobytes() == expected.tobytes()
    for response, message in zip(
        responses[1:], ("nobody", "x and y have 2 and 3 tokens", "at most 512"), strict=True
    ):
        assert not response.output_tensors
        assert message in response.error.message
    (refused,) = triton.execute([wide])
    assert "x is float16 (2, 65)" in refused.error.message


def test_more_requests_than_a_step_holds_are_several_steps(triton: Any) -> None:
    requests = [_request("contracts-r8", 200, seed) for seed in range(4)]
    before = triton.runtime.counts()
    responses = triton.execute(requests)
    after = triton.runtime.counts()
    assert after.tokens - before.tokens == 800
    assert sum(after.hits.values()) - sum(before.hits.values()) == 2
    for request, response in zip(requests, responses, strict=True):
        (alone,) = map(_y, triton.execute([request]))
        assert _y(response).tobytes() == alone.tobytes()
