"""Sampling settings of the Python API: the engine's, and those that are applied to the text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrelay.core import sampling as core
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.openai.answer_spec import AnswerSpec
from kvrelay.frontend.tokens.tokenizer import DefaultSampling

MAX_N = 16_384
"""As in vLLM."""


class SamplingParams(core.SamplingParams, frozen=True, omit_defaults=True):
    """``kvrelay.core.sampling.SamplingParams``, and in addition:

    ``n`` answers per prompt. ``stop``: strings that end an answer; they are not part of it unless
    ``include_stop_str_in_output``. ``detokenize`` False leaves ``text`` empty and saves its cost; it excludes ``stop``.
    """

    n: int = 1
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def recommended(defaults: DefaultSampling) -> SamplingParams:
    """The values of the checkpoint's ``generation_config.json``, or else kvrelay's defaults."""
    return SamplingParams(**defaults.given)  # type: ignore[arg-type]


def spec_of(params: SamplingParams) -> AnswerSpec:
    """The spec that all answers of one call share. Raises InvalidInputError, also for a value of another type: an
    engine would drop the request as malformed."""
    try:
        params = msgspec.convert(msgspec.structs.asdict(params), SamplingParams)
    except msgspec.ValidationError as exc:
        raise InvalidInputError(f"sampling_params: {exc}", param="sampling_params") from exc
    if not 1 <= params.n <= MAX_N:
        raise InvalidInputError(f"n must be between 1 and {MAX_N}", param="n")
    if not all(params.stop_strings):
        raise InvalidInputError("stop strings must not be empty", param="stop")
    if params.stop_strings and not params.detokenize:
        raise InvalidInputError("stop strings need the text: detokenize must be true", param="stop")
    engine = core.SamplingParams(**{name: getattr(params, name) for name in core.SamplingParams.__struct_fields__})
    engine.validate()
    return AnswerSpec(
        sampling=engine,
        max_tokens=params.max_tokens,
        is_max_default=False,
        n=params.n,
        stops=params.stop_strings,
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        detokenize=params.detokenize,
    )
