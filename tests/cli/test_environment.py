"""scripts/environment.sh finds a Python that works, not one that only has the right name."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def find_python(folder: Path, pyenv: Path) -> subprocess.CompletedProcess[str]:
    """Runs find_python with `folder` as the whole PATH."""
    return subprocess.run(
        ["/bin/bash", "-c", "source scripts/environment.sh; find_python"],
        cwd=ROOT,
        env={"PATH": str(folder), "PYENV_ROOT": str(pyenv)},
        capture_output=True,
        text=True,
    )


def add_command(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def test_failing_shims_and_old_versions_are_passed_over(tmp_path: Path):
    add_command(tmp_path / "bin" / "python3.12", "echo 'not installed' >&2; exit 127")
    add_command(tmp_path / "bin" / "python3", "exit 1  # as an old version answers the check")
    good = tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python3"
    add_command(good, f'exec {sys.executable} "$@"')
    found = find_python(tmp_path / "bin", tmp_path / "pyenv")
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == sys.executable


def test_no_python_is_one_clear_line(tmp_path: Path):
    add_command(tmp_path / "bin" / "basename", 'echo "${1##*/}"')
    found = find_python(tmp_path / "bin", tmp_path / "pyenv")
    assert found.returncode == 1 and found.stdout == ""
    assert "found no working Python >= 3.12" in found.stderr
    assert found.stderr.count("\n") == 1
