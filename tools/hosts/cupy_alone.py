"""CuPy alone: an adapter's delta on q, k and v, in ten lines.

Your model leaves x and the projections' outputs y in CuPy arrays; ``add_deltas`` adds, in place,
what the adapter in slot 0 changes for tokens 0 and 2. On a GPU:

    python tools/hosts/cupy_alone.py

With ``--backend numpy`` the same lines run on NumPy arrays.
"""

from __future__ import annotations

import argparse
from typing import Any

from cupylora import (
    Arena,
    BatchPlan,
    DenseLora,
    LoraLimits,
    SlotTable,
    Workspace,
    dense_needs,
    load_adapter,
    load_model,
    open_backend,
)
from cupylora.resources import data_dir


def add_deltas(here: Any, x: Any, y: Any) -> None:
    """y [4, 128] += the adapter's delta of x [4, 64], for tokens 0 and 2; float16 both."""
    model, limits = load_model("tiny-moe"), LoraLimits(max_loras=4, max_rank=16)
    table = SlotTable(model, limits, "float16", xp=here.xp, arena=Arena(1 << 20, here.xp))
    load_adapter(data_dir() / "demo" / "contracts-r8", table, slot=0)
    sizes = {"max_tokens": 4, "max_rank": 16, "dtype": "float16"}
    room = Workspace(here, [dense_needs(here, model.dense_groups[0], **sizes)])
    qkv = DenseLora.of_table(table, 0, ["q_proj", "k_proj", "v_proj"], room)
    # All above is made once. A step, on CuPy's current stream, is the rest:
    plan = BatchPlan(here, max_tokens=4, max_loras=4)
    plan.update(here.xp.asarray([0, -1, 0, -1], dtype="int32"))  # a slot for each token
    qkv.add(x, y, plan)


def main() -> None:
    """Show that tokens of no adapter keep their values."""
    parser = argparse.ArgumentParser(description=add_deltas.__doc__)
    parser.add_argument("--backend", default="cuda", choices=["cuda", "numpy"])
    here = open_backend(parser.parse_args().backend)
    x, y = here.xp.ones((4, 64), "float16"), here.xp.zeros((4, 128), "float16")
    add_deltas(here, x, y)
    here.synchronize()
    print(here.to_host(y)[:, :4])


if __name__ == "__main__":
    main()
