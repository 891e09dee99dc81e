"""What never returns ends the whole run, with the tracebacks of all threads: no hang is endless.

pytest-timeout fails a test in time, unless native code keeps Python's signal handlers from running.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

HANGS = {
    "native_code_that_holds_the_gil": """
import ctypes

def never_returns():
    while True:
        ctypes.PyDLL(None).pause()

def test():
    never_returns()
""",
    "native_code_without_the_gil": """
import threading

import jax

def never_returns(x):
    threading.Event().wait()

def test():
    x = jax.numpy.ones(())
    jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(never_returns, x, x))(x))
""",
    "a_thread_left_behind": """
import threading

def never_returns():
    threading.Event().wait()

def test():
    threading.Thread(target=never_returns).start()
""",
}


@pytest.mark.parametrize("name", HANGS)
def test_the_run_ends(name, tmp_path):
    (tmp_path / "test_hanging.py").write_text(HANGS[name])
    settings = ["-c", str(TESTS.parent / "pyproject.toml"), "-o", "faulthandler_timeout=1"]
    if name == "a_thread_left_behind":
        settings += ["-p", "conftest"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert "in never_returns" in done.stderr
