"""FAULTS.md names every kind of fault, and tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Sections 1 to 9 of the project's collection; what is missing in between was given up there.
ENTRIES = [
    *("B01", "B02", "B04", "B05", "B06", "B07", "B08", "B10", "B11", "B12", "B13", "B14", "B15"),
    *("B16", "B17", "B18", "B19", "B20", "B21", "B23", "B24", "B25"),
    *("B26", "B28", "B29", "B30", "B31", "B32", "B33", "B35", "B36", "B37"),
    *("B39", "B40", "B41", "B42", "B43"),
    *("B44", "B45", "B48", "B49", "B51"),
    *("B52", "B53", "B55"),
    *("B56", "B57", "B58", "B59", "B60", "B61", "B63", "B64"),
    *("B65", "B67", "B68", "B69", "B71", "B72", "B73", "B75"),
    *("B76", "B77", "B79", "B80", "B81", "B82"),
]


def read_map(text: str) -> dict[str, list[str]]:
    """Entry -> the tests named in its row."""
    rows = [re.split(r"\s*\|\s*", line) for line in text.splitlines() if line.startswith("| B")]
    assert all(len(row) == 5 for row in rows), "a row has other columns"
    return {row[1]: re.findall(r"`([^`]+)`", row[3]) for row in rows}


@cache
def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def missing_tests(tests: list[str]) -> list[str]:
    parts = [test.partition("::") for test in tests]
    return [f"{file}::{name}" for file, _, name in parts if name not in functions_of(TESTS / file)]


def test_every_entry_is_there():
    assert list(read_map((TESTS / "FAULTS.md").read_text())) == ENTRIES


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_test_of_an_entry_exists(entry: str):
    tests = read_map((TESTS / "FAULTS.md").read_text())[entry]
    assert tests and missing_tests(tests) == []


def test_a_test_that_is_gone_shows():
    row = "| B01 | x | `test_fault_map.py::test_every_entry_is_there` `nowhere.py::test_x` |"
    tests = read_map(row)["B01"]
    assert missing_tests(tests) == ["nowhere.py::test_x"]
    assert missing_tests(["test_fault_map.py::test_never"]) == ["test_fault_map.py::test_never"]
