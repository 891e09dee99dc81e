"""What scripts need to measure in processes of their own: this one never touches a device.

A process that holds a GPU leaves no room on it for another, and one that fails takes what it has
measured with it. So each figure is told as it comes, as a line of JSON: {"name": value}.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def gpu_name() -> str | None:
    """Of JAX's first device; None when that is no GPU."""
    code = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind, sep='\\n')"
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    platform, kind = output.splitlines()[-2:]
    return kind if platform == "gpu" else None


def figures_of(
    python: str, script: Path, options: Mapping[str, Any], **environment: str
) -> Iterator[tuple[str, float]]:
    """Runs a script that takes options as JSON; its figures, as they come.

    Raises:
      CalledProcessError: it failed, after what it has told.
    """
    command = [python, str(script), json.dumps(options)]
    environment = {**os.environ, **environment}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield from json.loads(line).items()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def tell(name: str, value: float) -> None:
    """The other end of `figures_of`."""
    print(json.dumps({name: value}), flush=True)


@contextmanager
def model_folder(config: Mapping[str, Any], *, has_tokenizer: bool) -> Generator[str]:
    """A folder with a config.json, and perhaps a tokenizer that knows all of its token ids."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        if has_tokenizer:
            _save_tokenizer(Path(folder) / "tokenizer.json", config["vocab_size"])
        yield folder


def _save_tokenizer(file: Path, vocab_size: int) -> None:
    """Bytes are the first 256 tokens, made-up words the others, which no text becomes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet + [f"w{i}" for i in range(len(alphabet), vocab_size)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(file))
