"""An engine alone needs neither the grammars' library nor the server's."""

import subprocess
import sys

CODE = """
import sys
for name in ("llguidance", "grpc", "google.protobuf", "zmq", "msgspec", "prometheus_client"):
    sys.modules[name] = None  # to import it raises
import jaxpaged.engine
"""
WITH_GRAMMARS = """
import jaxpaged.grammar
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_an_engine_imports_no_grammars_and_no_server():
    result = run(CODE)
    assert result.returncode == 0, result.stderr
    # Negative control.
    assert "llguidance" in run(CODE + WITH_GRAMMARS).stderr
