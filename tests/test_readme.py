"""What the README shows in Python runs as it stands, and what it shows in C compiles."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from host_util import STRICT, build, hollow, write_hollow

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)
C_BLOCKS = re.findall(r"^```c\n(.*?)^```", README, re.S | re.M)


def test_there_are_examples() -> None:
    assert len(BLOCKS) == 5
    assert len(C_BLOCKS) == 1


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_an_example_runs(block: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


MAIN = """
int main(int count, char** words) {
  static cupylora_op lists, delta;
  cupylora* kernels;
  cupylora_error error;
  cupylora_lists at = {0};
  cupylora_status status = prepare_step(words[count - 1], &kernels, &lists, &delta, &error);
  if (status == CUPYLORA_OK) {
    status = enqueue_step(&lists, &delta, NULL, 0, 0, 0, 0, 0, &at, 0, 0, 0, &error);
  }
  return (int)status;
}
"""


@pytest.mark.parametrize("tool", ["gcc", "g++"])
def test_the_c_example_compiles(tool: str, tmp_path: Path) -> None:
    include = f"-I{write_hollow(tmp_path / 'export', hollow()) / 'include'}"
    source = tmp_path / ("step.c" if tool == "gcc" else "step.cpp")
    text = C_BLOCKS[0] + MAIN
    source.write_text(text if tool == "gcc" else text.replace("{0}", "{}"))
    warnings = (*STRICT, "-Wno-missing-field-initializers")
    build(tool, ("-O1", *warnings, include), [source], tmp_path / "step")
