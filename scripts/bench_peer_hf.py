"""The peer's half of bench_engine.py: Hugging Face's generate loop, float32, on the CPU or a GPU.

Runs in an environment with torch and transformers, which jaxpaged itself never needs:

    python bench_peer_hf.py '{"path": ..., "batch": [1, 8], ...}'

Prints the figures as one line of JSON.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, logging

logging.set_verbosity_error()


def main() -> None:
    options = json.loads(sys.argv[1])
    path = Path(options["path"])
    source = (
        {"pretrained_model_name_or_path": path}
        if path.is_dir()
        else {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, device_map=device).eval()

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
        return time.perf_counter() - start

    figures = {}
    num_new, num_prompt, repeats = (
        options["num_new"],
        options["prompt_tokens"],
        options["repeats"],
    )
    with torch.inference_mode():
        for batch in options["batch"]:
            run(batch, num_prompt, 4)
            seconds = statistics.median(
                (run(batch, num_prompt, 16 + num_new) - run(batch, num_prompt, 16)) / num_new
                for _ in range(repeats)
            )
            figures[f"decode_tokens_per_s_{batch}"] = batch / seconds
        num_prefill = options["prefill_tokens"]
        run(1, num_prefill, 1)
        seconds = statistics.median(run(1, num_prefill, 1) for _ in range(repeats))
        figures["prefill_tokens_per_s"] = num_prefill / seconds
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
