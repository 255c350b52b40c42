"""A fence whose steps are over when a test says so."""

from __future__ import annotations

from cupylora.graphs.fence import StepFence

__all__ = ["ManualFence"]


class ManualFence(StepFence):
    """Steps are over when a test says so; waiting finishes them."""

    def __init__(self) -> None:
        super().__init__()
        self.over = 0
        self.waited: list[int] = []

    def submit(self) -> int:
        self.enqueued += 1
        return self.enqueued

    def finished(self) -> int:
        return self.over

    def wait(self, step: int) -> None:
        self.waited.append(step)
        self.over = max(self.over, step)
