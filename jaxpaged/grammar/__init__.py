"""Structured output: what a text must match, and which tokens may come next.

A user's `Constraint` becomes a `grammar` (`grammar_of`, where requests are checked), a string that
travels to the engine; there a `Matcher` follows each sequence and fills its row of the mask.
"""

from jaxpaged.grammar.compiler import grammar_of
from jaxpaged.grammar.masks import MaskMaker
from jaxpaged.grammar.matcher import MaskFiller, Matcher, mask_width
from jaxpaged.grammar.vocabulary import Vocabulary

__all__ = ["MaskFiller", "MaskMaker", "Matcher", "Vocabulary", "grammar_of", "mask_width"]
