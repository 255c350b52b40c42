"""Which PTX of ``cuda_src`` is which function of ``ptx.h``.

A key is an asm statement's text in one line, without the braces, registers and predicates that only
serve to write it; the function takes the statement's outputs and inputs in their order.
"""

from __future__ import annotations

import re

__all__ = ["UnknownInstructionError", "function_of"]


class UnknownInstructionError(Exception):
    """The emulator has no model of an asm statement; add it here and to ptx.h."""


_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32"
_WGMMA = "wgmma.mma_async.sync.aligned.m64n{0}k16.f32.{1}.{1}"
_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_PUSH = "st.async.shared::cluster.mbarrier::complete_tx::bytes"

_FUNCTIONS = {
    "ld.global.nc.v4.u32 ?": "load_global16_if",
    "ld.global.v4.u32 ?": "load_global16_if",
    "ld.global.L1::no_allocate.v4.u32 ?": "load_global16_if",
    "ld.global.nc.v2.u32 ?": "load_global8_if",
    "ld.global.u32 ?": "load_global4_if",
    "st.global.u32 ?": "store_global4_if",
    "st.global.cs.v4.u32": "store_global16",
    "ld.shared.v4.u32": "load_shared16",
    "ld.shared.v2.u32": "load_shared8",
    "ld.shared.u32": "load_shared4",
    "ld.shared.u16": "load_shared2",
    "st.shared.v4.u32": "store_shared16",
    "st.shared.u32": "store_shared4",
    "st.shared.u16": "store_shared2",
    "st.relaxed.cta.shared.u8": "store_shared1_relaxed",
    "prefetch.global.L2": "prefetch",
    "prefetch.global.L2::evict_last": "prefetch",
    "createpolicy.fractional.L2::evict_first.b64": "evict_first_policy",
    "cp.async.cg.shared.global": "copy16_async",
    "cp.async.ca.shared.global": "copy4_async",
    "cp.async.cg.shared.global.L2::256B ?": "copy16_async_if",
    "cp.async.cg.shared.global.L2::cache_hint ?": "copy16_async_hinted_if",
    "cp.async.commit_group": "commit_async",
    "cp.async.wait_group": "wait_async",
    "cp.async.mbarrier.arrive.noinc.shared.b64": "mbarrier_arrive_after_copies",
    _BULK: "bulk_load",
    "fence.proxy.async.shared::cta": "fence_async_proxy",
    "mapa.shared::cluster.u32": "map_shared",
    f"{_PUSH}.v4.f32": "push4",
    f"{_PUSH}.f32": "push1",
    "mbarrier.init.shared::cta.b64": "mbarrier_init",
    "mbarrier.init.shared.b64": "mbarrier_init",
    "fence.mbarrier_init.release.cluster": "fence_mbarrier_init",
    "mbarrier.arrive.release.cta.shared::cta.b64": "mbarrier_arrive",
    "mbarrier.arrive.shared.b64": "mbarrier_arrive",
    "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64": "mbarrier_expect",
    "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 loop": "mbarrier_wait",
    "mbarrier.try_wait.parity.shared.b64 loop": "mbarrier_wait",
    "mbarrier.test_wait.parity.shared.b64 loop": "mbarrier_wait",
    "bar.sync": "bar_sync",
    "barrier.cluster.arrive.relaxed.aligned": "cluster_arrive_relaxed",
    "barrier.cluster.wait.acquire.aligned": "cluster_wait",
    "mov.u32 %%cluster_ctarank": "cluster_rank",
    "mov.u32 %%clusterid.x": "cluster_index",
    "mov.u32 %%cluster_nctarank": "cluster_size",
    "griddepcontrol.wait": "wait_for_predecessor",
    "griddepcontrol.launch_dependents": "release_successor",
    _MMA.format("bf16"): "mma_bf16",
    _MMA.format("f16"): "mma_fp16",
    **{_WGMMA.format(columns, "bf16"): "wgmma_bf16" for columns in (32, 64)},
    **{_WGMMA.format(columns, "f16"): "wgmma_fp16" for columns in (32, 64)},
    "wgmma.fence.sync.aligned": "wgmma_fence",
    "wgmma.commit_group.sync.aligned": "wgmma_commit",
    "wgmma.wait_group.sync.aligned": "wgmma_wait",
    "": "nothing",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": "ldmatrix_x4",
    "cvt.rn.bf16.f32": "float_to_bf16",
    "cvt.rn.f16.f32": "float_to_fp16",
    "cvt.f32.f16": "fp16_to_float",
    "cvt.rn.bf16x2.f32": "floats_to_bf16x2",
    "cvt.rn.f16x2.f32": "floats_to_fp16x2",
    "ex2.approx.ftz.f32": "exp2_approx",
    "rcp.approx.f32": "reciprocal_approx",
    "sub.cc.u32; subc.u32": "subtract_borrow",
}
_SETUP = re.compile(r"\.reg |setp\.|mov\.u32 %\d, 0$|again:$|[{}]$")
_LOOP = "@!done bra again"


def function_of(ptx: str) -> str:
    """Name of the function for an asm statement's text; raises UnknownInstructionError."""
    lines = [line.strip() for line in re.split(r"\\n|;", ptx)]
    lines = [line for line in lines if line and not _SETUP.match(line)]
    loops, lines = _LOOP in lines, [line for line in lines if line != _LOOP]
    key = "; ".join(_key(line) for line in lines) + (" loop" if loops else "")
    try:
        return _FUNCTIONS[key]
    except KeyError:
        raise UnknownInstructionError(f"{key!r}: {ptx!r}") from None


def _key(line: str) -> str:
    """The opcode, with "?" if predicated and with the special register that it reads, if any."""
    predicate, _, rest = line.rpartition("@p ")
    opcode = rest.split()[0]
    special = re.search(r"%%[\w.]+", rest)
    parts = (opcode, special.group() if special else "", "?" if predicate or "@p" in line else "")
    return " ".join(part for part in parts if part)
