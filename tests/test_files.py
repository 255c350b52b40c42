"""Opening files that somebody else chose, and what an interrupt may not do meanwhile."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from cupylora import files


def test_a_number_is_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor closed twice may be another thread's file the second time."""
    path = tmp_path / "a"
    path.write_bytes(b"x")
    taken: list[int] = []

    def interrupted(handle: int) -> Any:
        io.FileIO(handle).close()
        taken.append(os.open(path, os.O_RDONLY))  # the same number, for another thread
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files, "FileIO", interrupted)
        with pytest.raises(KeyboardInterrupt):
            files.open_regular(path)
    assert os.read(taken[0], 1) == b"x"
    os.close(taken[0])


def test_what_is_no_regular_file_is_closed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("fifo", ""):
        with pytest.raises((ValueError, OSError)):
            files.open_regular(tmp_path / name)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
