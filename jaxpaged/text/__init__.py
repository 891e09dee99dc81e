"""Text <-> token ids: the model's tokenizer and chat template, streamed text, stop strings."""

from jaxpaged.text.chat import render_chat
from jaxpaged.text.detokenizer import Detokenizer
from jaxpaged.text.stops import StopChecker, StopMatch
from jaxpaged.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Detokenizer",
    "StopChecker",
    "StopMatch",
    "Tokenizer",
    "load_tokenizer",
    "render_chat",
]
