"""The peer's half of bench_engine.py: Hugging Face's generate loop, float32, on the CPU or a GPU.

Runs in an environment with torch and transformers, which jaxpaged itself never needs:

    python bench_peer_hf.py '{"path": ..., "batch": [1, 8], ...}'
    python bench_peer_hf.py '{"path": FOLDER, "random": true, "generate": [[32, 128, 64]], ...}'

Tells each figure as it comes, as a line of JSON. `generate` is whole calls: (batch, tokens in,
tokens out). `random` takes the config alone and makes up the weights.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from bench_processes import tell
from transformers import AutoConfig, AutoModelForCausalLM, logging

logging.set_verbosity_error()


def main() -> None:
    options = json.loads(sys.argv[1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(Path(options["path"]), device, is_random=options.get("random", False))
    repeats = options["repeats"]

    def run(batch: int, num_prompt: int, num_new: int) -> float:
        prompt = torch.randint(100, model.config.vocab_size, (batch, num_prompt), device=device)
        start = time.perf_counter()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=num_new,
            max_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
        )
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    with torch.inference_mode():
        for batch in options.get("batch", ()):
            num_new, num_prompt = options["num_new"], options["prompt_tokens"]
            run(batch, num_prompt, 4)
            seconds = statistics.median(
                (run(batch, num_prompt, 16 + num_new) - run(batch, num_prompt, 16)) / num_new
                for _ in range(repeats)
            )
            tell(f"decode_tokens_per_s_{batch}", batch / seconds)
        num_prefill = options.get("prefill_tokens")
        if num_prefill is not None:
            run(1, num_prefill, 1)
            seconds = statistics.median(run(1, num_prefill, 1) for _ in range(repeats))
            tell("prefill_tokens_per_s", num_prefill / seconds)
        for batch, num_prompt, num_new in options.get("generate", ()):
            run(batch, num_prompt, 4)
            seconds = statistics.median(run(batch, num_prompt, num_new) for _ in range(repeats))
            tell(f"generate_tokens_per_s_{batch}", batch * num_new / seconds)


def load(path: Path, device: str, *, is_random: bool) -> torch.nn.Module:
    """The model in a folder or a GGUF file, in bf16 on a GPU."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if is_random:
        with torch.device(device):
            config = AutoConfig.from_pretrained(path)
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    source = (
        {"pretrained_model_name_or_path": path}
        if path.is_dir()
        else {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    )
    return AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, device_map=device).eval()


if __name__ == "__main__":
    main()
