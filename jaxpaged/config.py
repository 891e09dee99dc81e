"""Settings of one engine, before and after they meet a model and a device."""

from dataclasses import dataclass
from typing import Literal

LoadFormat = Literal["auto", "random"]
Scheduling = Literal["fcfs", "priority"]


@dataclass(frozen=True)
class EngineConfig:
    """What a user sets. None means: chosen from the model and the device when the engine starts.

    Attributes:
      model: folder, `.gguf` file, bundled name or hub id.
      dtype: "float32", "bfloat16", "float16" or None.
      max_model_len: tokens of prompt and output together.
      block_size: tokens a KV block holds.
      num_blocks: usable KV blocks, the null block apart.
      memory_fraction: share of the device's memory for weights, pool and temporaries.
      max_num_seqs: sequences that run at once (rows).
      max_num_tokens: a step's token budget; at least `max_num_seqs`.
      tensor_parallel: devices that share each layer.
      overlap: schedule step t+1 before the tokens of step t are read.
    """

    model: str
    dtype: str | None = None
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float = 0.9
    max_num_seqs: int | None = None
    max_num_tokens: int | None = None
    enable_prefix_caching: bool = True
    load_format: LoadFormat = "auto"
    generation_config: str = "auto"
    attention_impl: str | None = None
    tensor_parallel: int = 1
    scheduling: Scheduling = "fcfs"
    overlap: bool = True
    seed: int = 0
    max_queued_requests: int = 1024


@dataclass(frozen=True)
class ResolvedConfig:
    """The same once model and device are known: nothing is None but `attention_impl`.

    Attributes:
      model: the name under which it is served.
      vocab_size: width of the logits.
      platform: "cpu", "gpu" or "tpu".
      kv_dtype: of the KV pool.
    """

    model: str
    vocab_size: int
    platform: str
    dtype: str
    kv_dtype: str
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_tokens: int
    enable_prefix_caching: bool
    attention_impl: str | None
    tensor_parallel: int
    scheduling: Scheduling
    overlap: bool


@dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler needs, all of it decided.

    It always serves by priority: under "fcfs" the front lets no request have one.

    Attributes:
      step_sizes: tokens to which a step with prompts is padded, ascending; empty: it is not.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    step_sizes: tuple[int, ...] = ()
