"""The one-axis mesh of tensor parallelism, and how parameters are cut along it."""

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxpaged.errors import InvalidFieldError
from jaxpaged.models.config import ModelConfig

AXIS_NAME = "tensor"


def tensor_mesh(num_devices: int) -> Mesh:
    """A mesh over the first `num_devices` devices.

    Raises:
      InvalidFieldError: there are fewer.
    """
    devices = jax.devices()
    if not 1 <= num_devices <= len(devices):
        raise InvalidFieldError(
            "tensor_parallel",
            f"tensor_parallel={num_devices} must be between 1 and {len(devices)}, the number of "
            f"{devices[0].platform} devices here",
        )
    return Mesh(np.array(devices[:num_devices]), (AXIS_NAME,))


def check_divisible(config: ModelConfig, num_devices: int) -> None:
    """Raises InvalidFieldError with all sizes of the model that devices cannot share evenly."""
    sizes = {
        "num_kv_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
    }
    bad = [f"{name}={size}" for name, size in sizes.items() if size % num_devices]
    if bad:
        raise InvalidFieldError(
            "tensor_parallel", f"tensor_parallel={num_devices} must divide {', '.join(bad)}"
        )


def partition_spec(
    shape: tuple[int, ...], shard_axis: int | None, num_devices: int
) -> PartitionSpec:
    """Where a parameter is cut. One that does not divide (a vocabulary) is kept whole."""
    if shard_axis is None or shape[shard_axis] % num_devices:
        return PartitionSpec()
    return PartitionSpec(*[None] * shard_axis, AXIS_NAME)


def regroup_parts[ArrayT: (np.ndarray, jax.Array)](
    array: ArrayT, axis: int, num_parts: int, num_devices: int
) -> ArrayT:
    """Reorders parts lying side by side so that an even cut gives each device its share of each.

    before | A0 A1 | B0 B1 |      after | A0 B0 | A1 B1 |      (two parts, two devices)
    """
    shape = array.shape
    share = shape[axis] // (num_parts * num_devices)
    split = (*shape[:axis], num_parts, num_devices, share, *shape[axis + 1 :])
    return array.reshape(split).swapaxes(axis, axis + 1).reshape(shape)
