"""Compiled programs kept on disk, whole: a start that finds them traces and lowers nothing.

JAX's own cache spares XLA's work alone; to ask it, a program must be traced and lowered first,
which is seconds of Python for each `forward`. Here a program is found by what it is made from: the
caller describes it, this module adds the source of our packages, versions, flags and the devices.

Files hold pickles, and to read one is to run what it says. So the folder is the user's own, as that
of JAX's cache is, and one that other users may write to is refused.
"""

import hashlib
import logging
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import distributions, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import flax
import jax
from jax.experimental import serialize_executable
from jaxlib.version import __version__ as jaxlib_version

logger = logging.getLogger(__name__)

_OUR_PACKAGES = ("jaxpaged", "kernels_pallas")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# So begin the names of CUDA's packages: its assembler and libdevice are in our kernels, and XLA's
# programs name algorithms of cuBLAS and cuDNN by number.
_CUDA_PACKAGES = "nvidia"
# Parts of the names of JAX's settings that change no program.
_HARMLESS_SETTINGS = ("cache", "logging", "log_compiles")
_JAX_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_MIN_COMPILE_TIME = "jax_persistent_cache_min_compile_time_secs"
# About 30 times the programs of a 4B model on one GPU.
_MAX_BYTES = 4 * 2**30
_DIGEST_BYTES = hashlib.sha256().digest_size
# why: stores change a setting of JAX's while they are open, and set it back
_ONE_OPEN = threading.RLock()


class ExecutableStore:
    """A folder of programs for some devices; a file that is missing or bad is a miss, no error.

    What was used least recently goes when the folder grows too large.

    For platforms whose programs do not call back into Python: such a call does not survive.
    """

    def __init__(self, folder: Path, devices: Sequence[Any]):
        """Makes the folder.

        Raises:
          OSError: it cannot be made or read.
          PermissionError: it is another user's, or others may write to it.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(f"{folder} is not ours alone to write to")
        self._folder = folder
        self._devices = devices
        self._environment = _environment(devices)
        self._thread = threading.local()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """For `compile`, in any thread: no program lands in JAX's own cache as well.

        Another store, opened in another thread of this process, waits.
        """
        with _ONE_OPEN:
            # why: XLA may not be able to write a program again that was read from JAX's cache. On
            # the CPU such a copy loads, and fails when it runs.
            jax.monitoring.register_event_listener(self._note_hit)
            seconds = getattr(jax.config, _MIN_COMPILE_TIME)
            jax.config.update(_MIN_COMPILE_TIME, float("inf"))
            try:
                yield
            finally:
                jax.config.update(_MIN_COMPILE_TIME, seconds)
                jax.monitoring.unregister_event_listener(self._note_hit)
                with suppress(OSError):  # why: another process may prune too
                    prune(self._folder, _MAX_BYTES)

    def load(self, description: str, arguments: tuple[Any, ...]) -> jax.stages.Compiled | None:
        """The program of that description; None if there is none that loads.

        Args:
          description: all that shapes the program, beside what the module's text names.
          arguments: trees of the form that the program takes; their leaves do not matter.
        """
        file = self._file(description)
        try:
            content = file.read_bytes()
            digest, packed = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if hashlib.sha256(packed).digest() != digest:
                raise ValueError("it is damaged")
            serialized, outputs = pickle.loads(packed)
            program = serialize_executable.deserialize_and_load(
                serialized,
                jax.tree.structure((arguments, {})),
                jax.tree.structure(outputs),
                backend=self._devices[0].client,
                execution_devices=self._devices,
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # why all: whatever a foreign version wrote may raise anything
            logger.info("%s is not used: %s: %s", file, type(error).__name__, error)
            return None
        with suppress(OSError):  # why: programs may be read where nothing can be written
            os.utime(file)  # `prune` goes by it
        return program

    def compile(
        self, description: str, lowered: jax.stages.Lowered, options: dict[str, Any] | None
    ) -> jax.stages.Compiled:
        """Compiles a program, while `opened`, and keeps it."""
        self._thread.has_hit = False
        compiled = lowered.compile(options)
        if not self._thread.has_hit:
            self._save(self._file(description), compiled)
        return compiled

    def _save(self, file: Path, compiled: jax.stages.Compiled) -> None:
        try:
            serialized, _, out_tree = serialize_executable.serialize(compiled)
            # why no tree: a tree of our dataclasses cannot be pickled, one with leaves can
            outputs = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
            packed = pickle.dumps((serialized, outputs))
            _write(file, hashlib.sha256(packed).digest() + packed)
        except Exception as error:  # why all: a program that is not kept is compiled again
            logger.info("%s is not kept: %s: %s", file, type(error).__name__, error)

    def _note_hit(self, event: str, **_: Any) -> None:
        if event == _JAX_CACHE_HIT:
            self._thread.has_hit = True

    def _file(self, description: str) -> Path:
        text = f"{self._environment}\n{description}"
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()}.program"


def describe(arguments: Any) -> str:
    """Trees with their static parts, shapes, dtypes and shardings of a program's arguments."""
    leaves, tree = jax.tree.flatten(arguments)
    return f"{tree} {[(leaf.shape, leaf.dtype.name, leaf.sharding) for leaf in leaves]}"


def _environment(devices: Sequence[Any]) -> str:
    """What shapes every program here, and what must be the same for its file to load."""
    client = devices[0].client
    settings = sorted(jax.config.values.items())
    parts = {
        "source": [source_digest(_folder_of(package)) for package in _OUR_PACKAGES],
        "versions": (sys.version, jax.__version__, jaxlib_version, flax.__version__),
        "plugins": [
            (plugin.dist.name, plugin.dist.version)
            for plugin in entry_points(group="jax_plugins")
            if plugin.dist is not None
        ],
        "cuda": sorted(
            f"{package.name} {package.version}"
            for package in distributions()
            # why a default: what is left of a broken installation has no name
            if (package.name or "").startswith(_CUDA_PACKAGES)
        ),
        "platform": (client.platform, client.platform_version),
        "devices": [(device.id, device.device_kind) for device in devices],
        "flags": [os.environ.get(name) for name in _FLAGS],
        "settings": [
            (name, value)
            for name, value in settings
            if not any(part in name for part in _HARMLESS_SETTINGS)
        ],
    }
    return repr(parts)


def source_digest(folder: Path) -> str:
    """Changes with every name and every byte of the Python files in `folder`."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _folder_of(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _write(file: Path, content: bytes) -> None:
    """Writes all or nothing; two processes may write the same file."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
    try:
        with open(descriptor, "wb") as part:
            part.write(content)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def prune(folder: Path, max_bytes: int) -> None:
    """Removes the files used least recently, until what stays is small enough."""
    files = [(file, file.stat()) for file in folder.iterdir()]
    num_bytes = sum(status.st_size for _, status in files)
    for file, status in sorted(files, key=lambda item: item[1].st_mtime):
        if num_bytes <= max_bytes:
            break
        file.unlink(missing_ok=True)
        num_bytes -= status.st_size
