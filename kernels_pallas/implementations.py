"""Which implementation runs an operation: the names, what suits each, and what it cannot do."""

import jax
from jaxtyping import Array

from kernels_pallas import attention_hopper, attention_tpu, xla
from kernels_pallas.metadata import AttentionMetadata, Shaped
from kernels_pallas.pool import KVPool
from kernels_pallas.terms import num_terms_of
from kernels_pallas.tuning import AttentionTuning, HopperTuning, TPUTuning, default_tuning

# "..._interpret": the kernels in Pallas's interpreters, on the CPU; slow, for tests.
IMPLEMENTATIONS = ("xla", "reference", "hopper", "hopper_interpret", "tpu", "tpu_interpret")
# A platform that is not here takes "xla" too, which runs anywhere.
PLATFORM_IMPLEMENTATIONS = {"cpu": "xla", "gpu": "hopper", "tpu": "tpu"}

Tuning = AttentionTuning | HopperTuning | TPUTuning


def named(impl: str | None) -> str:
    """The implementation of this name; of None, the platform's own.

    Raises:
      ValueError: there is none of this name.
    """
    name = impl or PLATFORM_IMPLEMENTATIONS.get(_platform(), "xla")
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"impl={name!r} must be one of {IMPLEMENTATIONS} or None")
    return name


def choose(impl: str | None, q: Shaped, pool: KVPool) -> str:
    """As `named`; but None is "xla" on a GPU where the Hopper kernels cannot do this."""
    name = named(impl)
    if impl is None and name == "hopper" and unsupported(name, q, pool):
        return "xla"
    return name


def tuning_kind(name: str) -> type[Tuning]:
    """The only kind of tuning that the implementation takes."""
    kinds = {"hopper": HopperTuning, "tpu": TPUTuning}
    return kinds.get(name.removesuffix("_interpret"), AttentionTuning)


def tuning_for(name: str, q: Array, pool: KVPool, metadata: AttentionMetadata) -> Tuning:
    """What suits the implementation, for these shapes."""
    kind = tuning_kind(name)
    if kind is HopperTuning:
        num_terms = num_terms_of(q.dtype, pool.dtype)
        return attention_hopper.tuning_for(pool, metadata, num_terms)
    return (
        attention_tpu.tuning_for(q, pool) if kind is TPUTuning else default_tuning(pool.block_size)
    )


def unsupported(name: str, q: Shaped, pool: KVPool) -> list[str]:
    """Every reason why the implementation cannot do it."""
    platform = _platform()
    if name == "xla":
        return xla.unsupported(q, pool)
    if name == "reference":
        return [] if platform == "cpu" else [f"{platform=} is not cpu"]
    if name in ("hopper", "hopper_interpret"):
        reasons = attention_hopper.unsupported(q, pool)
        wanted = "gpu" if name == "hopper" else "cpu"
        if platform != wanted:
            reasons.append(f"{platform=} is not {wanted}")
        elif name == "hopper" and _is_another_gpu():
            reasons.append("the GPU's compute capability is not 9.0")
        return reasons
    wanted = "tpu" if name == "tpu" else "cpu"
    reasons = attention_tpu.unsupported(q, pool, interpreted=name == "tpu_interpret")
    return reasons if platform == wanted else [*reasons, f"{platform=} is not {wanted}"]


def hopper_multiprocessors(impl: str | None) -> int | None:
    """How many the GPU has that will run this; None where Hopper's products cannot."""
    if named(impl) != "hopper" or _platform() != "gpu" or _is_another_gpu():
        return None
    return attention_hopper.num_multiprocessors()


def _platform() -> str:
    """Where the program will run: the mesh's devices, which may be a mere description."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else jax.default_backend()


def _is_another_gpu() -> bool:
    """Whether the GPU here is none of Hopper's; a described one has no device to ask."""
    return jax.default_backend() == "gpu" and not attention_hopper.is_hopper()
