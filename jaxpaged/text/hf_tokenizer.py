"""Tokenizers in Hugging Face form, through transformers."""

import logging

from jaxpaged.checkpoint import Checkpoint
from jaxpaged.errors import CheckpointError, UnsupportedOptionError
from jaxpaged.text.parts import TokenizerParts


def _is_worth_showing(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("PyTorch was not found")


_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")


def load(checkpoint: Checkpoint) -> TokenizerParts | None:
    """None when the checkpoint's folder has no tokenizer files."""
    folder = checkpoint.path
    if not any((folder / file).is_file() for file in _FILES):
        return None
    # why: transformers tells at import that it cannot run models, which nobody asked of it here
    logging.getLogger("transformers").addFilter(_is_worth_showing)
    # why here: it takes long to import, and a folder without a tokenizer needs none of it
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # why: damaged or odd files make this library raise nearly everything, bare Exception included
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"cannot load the tokenizer in {folder}: {reason}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedOptionError(
            "model",
            f"the tokenizer in {folder} ({type(tokenizer).__name__}) has no form that the"
            " tokenizers library runs",
        )
    template = tokenizer.chat_template
    return TokenizerParts(
        backend=backend,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        chat_template=template.get("default") if isinstance(template, dict) else template,
        special_tokens={
            name: text
            for name, text in tokenizer.special_tokens_map.items()
            if isinstance(text, str)
        },
    )
