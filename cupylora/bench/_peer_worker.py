"""Times and checks peers' kernels in a Python that has torch: one JSON request a line, one answer.

Run by its path with the folder that the peers' ``setup.sh`` has made, whose harness does the work;
it needs that folder's modules and the standard library alone. Answers go to what was standard
output; what libraries print goes to standard error.
"""

from __future__ import annotations

import json
import math
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ERROR_LIMIT = 1.2e-2
_ROUTE_CALLS, _SMALL_ROUTE, _LARGE_GROUPS = 50, 512, 8192


class _Rows:
    """Stands for the harness's table of results."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        self.rows.append(row)


class _Worker:
    def __init__(self, folder: Path) -> None:
        os.environ.pop("OURS", None)  # the harness would look for it
        sys.path[0] = str(folder / "harness")  # in place of this file's folder
        names = ("common", "dense", "moe", "torch", "triton")
        modules: list[Any] = [import_module(name) for name in names]
        self.common, self.dense, self.moe, self.torch, triton = modules
        self.versions = {"torch": self.torch.__version__, "triton": triton.__version__}
        self._pool: Any = None
        self._pool_key: Any = None

    def hello(self, _: dict[str, Any]) -> dict[str, Any]:
        device = self.torch.cuda.get_device_name(0) if self.torch.cuda.is_available() else ""
        return {"versions": self.versions, "device": device}

    def check(self, request: dict[str, Any]) -> dict[str, Any]:
        """Each peer's outputs against the harness's reference; compiles its kernels too."""
        case, kind = self._case(request), request["kind"]
        if kind == "dense":
            rows = self.dense.check(case, request["seed"])
        elif kind == "moe":
            key = (case["model"], case["r"], request["max_loras"])
            if key != self._pool_key:
                self._drop_pool()
                self._pool, self._pool_key = self.moe.Pool(*key[:2]), key
            rows = self.moe.check(case, self._pool, request["seed"])
        else:
            rows = []
        bad = {}
        for row in rows:
            errors = [row[name] for name in ("err", "err13", "err2") if name in row]
            if not all(error < ERROR_LIMIT for error in errors):
                bad[row["peer"]] = f"relative error {errors}: {row.get('info', '')}"
        return {"bad": bad}

    def time(self, request: dict[str, Any]) -> dict[str, Any]:
        """Microseconds of each peer that serves the case; why, of each that fails."""
        self._drop_pool()
        kind = request["kind"]
        if kind == "route":
            return {"us": {"sgl_route": self._route_us(request)}, "failed": {}}
        case, rows, module = self._case(request), _Rows(), getattr(self, kind)
        module.time_all(rows, request["bandwidth"], [case])
        times = {row["peer"]: row["us"] for row in rows.rows}
        return {
            "us": {name: us for name, us in times.items() if math.isfinite(us)},
            "failed": {
                row["peer"]: str(row.get("info", ""))
                for row in rows.rows
                if not math.isfinite(row["us"])
            },
        }

    def _case(self, request: dict[str, Any]) -> dict[str, Any]:
        """The case as the harness writes it, its modules set up for it."""
        sizes = {"r": request["rank"], "T": request["tokens"], "act": request["active"]}
        if request["kind"] == "dense":
            self.dense.K = request["in_features"]
            return {**sizes, "N": request["out_features"], "ml": request["max_loras"]}
        self.moe.ML = request["max_loras"]
        self.moe.MODELS.setdefault(
            request["model"],
            {
                "H": request["in_features"],
                "I": request["out_features"],
                "E": request["experts"],
                "k": request["top_k"],
                "cfg": None,
            },
        )
        return {**sizes, "model": request["model"]}

    def _route_us(self, request: dict[str, Any]) -> float:
        build_route = import_module("sglang.kernels.ops.lora.common.routing").build_route
        torch, device = self.torch, self.common.DEV
        tokens, top_k, experts = request["tokens"], request["top_k"], request["experts"]
        slots = request["max_loras"]
        kept: list[Any] = []
        token_slots = torch.randint(0, slots, (tokens,), device=device, dtype=torch.int32)
        scores = torch.rand(tokens, experts, device=device)
        ids = scores.topk(top_k, 1).indices.to(torch.int32)
        large = tokens * top_k > _SMALL_ROUTE and experts * slots < _LARGE_GROUPS

        def build() -> None:
            kept.append(
                build_route(
                    token_slots,
                    group_ids=ids,
                    groups_per_slot=experts,
                    max_loras=slots,
                    block_size=16,
                    capacity=0 if large else None,
                )
            )

        return float(self.common.bench_graph([build] * _ROUTE_CALLS)[0])

    def _drop_pool(self) -> None:
        self._pool = self._pool_key = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return dict(getattr(self, request["do"])(request))
        except Exception as error:  # the caller decides what to make of it
            return {"error": f"{type(error).__name__}: {error}"[:300]}
        finally:
            if self.torch.cuda.is_available():
                self.torch.cuda.synchronize()  # a device that is lost ends this process
                self.torch.cuda.empty_cache()


def _serve(folder: Path) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = _Worker(folder)
    for line in sys.stdin:
        answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
