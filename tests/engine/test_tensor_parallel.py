import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "helpers" / "compare_engines.py"


def test_engines_on_one_two_and_four_devices_agree():
    # why a process: fake devices slow every step, and their number is fixed when JAX starts
    flags = "--xla_force_host_platform_device_count=4"
    result = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "equal"
