"""From what a user asks to what an engine takes: tokens, checked limits, every option resolved."""

import asyncio
import logging
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from jaxpaged import checkpoint, validation
from jaxpaged.config import EngineConfig, ResolvedConfig
from jaxpaged.errors import InvalidFieldError, UnsupportedOptionError
from jaxpaged.front_checks import check_chat, check_constraint
from jaxpaged.grammar import Vocabulary, grammar_of
from jaxpaged.outputs import ModelInfo
from jaxpaged.prompts import token_ids_of
from jaxpaged.request import EngineRequest
from jaxpaged.sampling_params import (
    ChatPrompt,
    Constraint,
    Prompt,
    ResolvedParams,
    SamplingParams,
)
from jaxpaged.sampling_validation import (
    SamplingDefaults,
    check_with_constraint,
    resolve_beams,
    resolve_params,
    unsupported_defaults,
)
from jaxpaged.text import Tokenizer, load_tokenizer, render_chat

logger = logging.getLogger(__name__)

# Longer texts are tokenised in a thread, so that other streams go on meanwhile.
_THREAD_TEXT_LENGTH = 4096


@dataclass(frozen=True)
class FrontModel:
    """What a front needs of a model: everything but its weights.

    Attributes:
      vocabulary: None where no constraint can be obeyed: there is no tokenizer, or no EOS.
    """

    config: EngineConfig
    tokenizer: Tokenizer | None
    defaults: SamplingDefaults
    eos_token_ids: frozenset[int]
    vocabulary: Vocabulary | None = None

    @classmethod
    def load(cls, config: EngineConfig) -> "FrontModel":
        """Reads the model's files.

        Raises:
          JaxpagedError: there is no such model, or its files are damaged.
        """
        located = checkpoint.locate(config.model, config.load_format)
        wishes = located.generation_config if config.generation_config == "auto" else {}
        for wish in unsupported_defaults(wishes):
            logger.warning("the model's generation config asks for %s: not supported yet", wish)
        tokenizer = load_tokenizer(located)
        return cls(
            config,
            tokenizer,
            SamplingDefaults.from_generation_config(wishes),
            tokenizer.eos_token_ids
            if tokenizer
            else checkpoint.eos_token_ids(located.config, located.generation_config),
            _vocabulary_of(tokenizer),
        )


class RequestMaker:
    """Makes engine requests for one model and the engine that runs it."""

    def __init__(self, model: FrontModel, resolved: ResolvedConfig):
        self._model = model
        self._resolved = resolved
        self._vocabulary = model.vocabulary and model.vocabulary.resized(resolved.vocab_size)
        # Ids that no logit belongs to are never drawn.
        self._eos_token_ids = frozenset(i for i in model.eos_token_ids if i < resolved.vocab_size)
        # Of its own: a large constraint must not hold up long texts.
        self._compilers = ThreadPoolExecutor(2, "jaxpaged-constraint")
        self._seeds = random.Random(model.config.seed)

    async def make(
        self,
        engine_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        length_penalty: float | None = None,
    ) -> EngineRequest:
        """A request that the engine can run as it is.

        Args:
          length_penalty: makes it a beam search of n beams.

        Raises:
          JaxpagedError: what is wrong with it.
        """
        model, resolved = self._model, self._resolved
        params = params or SamplingParams()
        num_new = 0 if params.max_tokens == 0 else 1
        token_ids = validation.check_prompt(await self.tokenize(prompt), resolved, num_new=num_new)
        options = resolve_params(
            params,
            resolved,
            model.defaults,
            num_prompt_tokens=len(token_ids),
            is_chat=isinstance(prompt, ChatPrompt),
            eos_token_ids=self._eos_token_ids,
            draw_seed=lambda: self._seeds.getrandbits(64) - 2**63,
        )
        if params.constraint is not None:
            options = replace(options, grammar=await self._grammar_of(params.constraint, options))
        if length_penalty is not None:
            options = resolve_beams(options, resolved, length_penalty, self._eos_token_ids)
        if options.stop and model.tokenizer is None:
            raise InvalidFieldError("stop", f"stop={options.stop} needs a tokenizer: none here")
        return EngineRequest(
            request_id=engine_id,
            prompt_token_ids=token_ids,
            params=options,
            eos_token_ids=frozenset() if options.ignore_eos else self._eos_token_ids,
        )

    async def _grammar_of(self, constraint: Constraint, options: ResolvedParams) -> str:
        """Compiles a constraint, in a thread: a large one takes a second."""
        check_constraint(constraint)
        if self._vocabulary is None:
            raise UnsupportedOptionError(
                "constraint", "constraint needs a tokenizer that has an EOS token: none here"
            )
        check_with_constraint(options, self._eos_token_ids)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compilers, grammar_of, constraint, self._vocabulary)

    async def tokenize(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """The token ids that `generate` would use for this prompt.

        Raises:
          ContextTooLongError: a text that cannot fit the context, whatever its tokens are: the
            tokenizer would hold up every other request for as long as it takes.
        """
        if not isinstance(prompt, str | ChatPrompt):
            return token_ids_of(prompt)
        tokenizer = self._model.tokenizer
        if isinstance(prompt, ChatPrompt):
            check_chat(prompt)
        if tokenizer is None:
            raise InvalidFieldError("prompt", "the model has no tokenizer: give token ids")
        await self._check_text_length(prompt)
        if isinstance(prompt, ChatPrompt):
            return await asyncio.to_thread(
                render_chat,
                tokenizer,
                prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                template_args=prompt.template_args,
            )
        if len(prompt) <= _THREAD_TEXT_LENGTH:
            return tokenizer.encode(prompt, add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, prompt, add_special_tokens)

    def model_info(self, weights_version: str) -> ModelInfo:
        resolved, tokenizer = self._resolved, self._model.tokenizer
        defaults = self._model.defaults
        return ModelInfo(
            model=resolved.model,
            weights_version=weights_version,
            vocab_size=resolved.vocab_size,
            eos_token_ids=sorted(self._model.eos_token_ids),
            bos_token_id=tokenizer.bos_token_id if tokenizer else None,
            has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
            dtype=resolved.dtype,
            kv_dtype=resolved.kv_dtype,
            block_size=resolved.block_size,
            num_blocks=resolved.num_blocks,
            max_model_len=resolved.max_model_len,
            max_num_seqs=resolved.max_num_seqs,
            max_queued_requests=self._model.config.max_queued_requests,
            default_temperature=defaults.temperature,
            default_top_k=defaults.top_k,
            default_top_p=defaults.top_p,
            default_min_p=defaults.min_p,
            default_repetition_penalty=defaults.repetition_penalty,
        )

    async def _check_text_length(self, prompt: str | ChatPrompt) -> None:
        """Refuses what is too long whatever its tokens are, without tokenising it."""
        tokenizer, max_model_len = self._model.tokenizer, self._resolved.max_model_len
        length = len(prompt) if isinstance(prompt, str) else 0
        if isinstance(prompt, ChatPrompt):
            # Every message has a token of its own at least.
            num_messages = len(prompt.messages)
            validation.check_prompt_len(num_messages, self._resolved, num_new=0, at_least=True)
            length = sum(len(str(m.get("content") or "")) for m in prompt.messages)
        if tokenizer is None or length <= 16 * max_model_len:
            return
        longest = await asyncio.to_thread(tokenizer.max_token_bytes)
        num_tokens = length // longest
        validation.check_prompt_len(num_tokens, self._resolved, num_new=0, at_least=True)


def _vocabulary_of(tokenizer: Tokenizer | None) -> Vocabulary | None:
    try:
        return tokenizer and Vocabulary.of(tokenizer, tokenizer.vocab_size)
    except UnsupportedOptionError:
        return None
