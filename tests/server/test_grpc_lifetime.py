"""The collector must never wait for gRPC's poller, in whatever thread it finds the last channel."""

import subprocess
import sys

import pytest

# Tells whether a thread was waited for while the last channel went.
DROPS_A_CHANNEL = """
import asyncio, gc, threading
import grpc.aio
from jaxpaged.client_channel import open_async_channel
from jaxpaged.connection import Connection

async def use():
    channel = {channel}
    await channel.close()

waits = []
join = threading.Thread.join
threading.Thread.join = lambda self, timeout=None: (waits.append(timeout), join(self, timeout))
asyncio.run(use())
gc.collect()
print("waited" if waits else "went")
"""


@pytest.mark.parametrize(
    ("channel", "told"),
    [
        ('open_async_channel("127.0.0.1:1", Connection())', "went"),
        ('grpc.aio.insecure_channel("127.0.0.1:1")', "waited"),  # what gRPC does by itself
    ],
    ids=["ours", "control"],
)
def test_the_last_channel_goes_without_a_wait(channel, told):
    code = DROPS_A_CHANNEL.format(channel=channel)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == told, run.stderr
