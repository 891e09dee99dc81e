"""The scripts for owners of a TPU run where none is, as far as they can."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SCRIPTS.parent)}
    return subprocess.run(
        [sys.executable, str(SCRIPTS / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )


def test_the_estimate_never_beats_the_floor():
    done = run("estimate_tpu.py", "--context", "590")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if " x 590 |" in line]
    assert len(rows) == 14  # four generations, two models, two batches; 8B does not fit a v5e
    for row in rows:
        assert 0 < float(row[4]) < float(row[5])


def test_tuning_refuses_where_no_tpu_is():
    done = run("tune_tpu.py")
    assert done.returncode == 1
    assert "no TPU here, only cpu" in done.stderr


@pytest.mark.long
def test_tuning_runs_in_the_interpreter():
    done = run("tune_tpu.py", "--interpret")
    assert done.returncode == 0, done.stderr
    assert "MEASURED_TPU_TILES['cpu', 256] = TPUTuning(" in done.stdout
