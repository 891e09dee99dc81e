"""Heads spread over several devices: the same numbers on 1, 2 and 4."""

import os
import subprocess
import sys
from pathlib import Path

# Several CPU devices must be asked for before JAX starts, hence a process of its own.
PROGRAM = """
import functools
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from helpers.attention_cases import Shape, assert_close, assert_same_pool, make_case, oracle
from kernels_pallas import ops
from kernels_pallas.pool import pool_partition_spec

case = make_case(
    [(1, 30), (1, 5), (6, 9)],
    num_decode_rows=2,
    shape=Shape(num_q_heads=8, num_kv_heads=4, num_tokens=12, num_rows=4),
)
sinks = jax.numpy.linspace(-1.0, 2.0, 8)
expected, expected_pool = oracle(case, sm_scale=0.3, sinks=sinks)
assert len(jax.devices()) == 4
for num_devices in (1, 2, 4):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("tensor",))
    heads, pool_spec = P(None, "tensor"), pool_partition_spec("tensor")
    attend = lambda q, k, v, pool, layer, metadata, sinks: ops.paged_attention(
        q, k, v, pool, layer, metadata, sm_scale=0.3, sinks=sinks
    )
    sharded = jax.jit(jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(heads, heads, heads, pool_spec, P(), P(), P("tensor")),
        out_specs=(heads, pool_spec),
    ))
    args = list(case.args)
    args[3] = jax.device_put(case.pool, NamedSharding(mesh, pool_spec))
    out, pool = sharded(*args, sinks)
    assert out.sharding.num_devices == pool.data.sharding.num_devices == num_devices
    assert_close(out, expected)
    assert_same_pool(jax.device_get(pool), expected_pool)
    print("devices", num_devices)
"""


def test_one_two_and_four_devices():
    tests = Path(__file__).parents[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:3] == ["devices 1", "devices 2", "devices 4"]
