"""The choices of a request: ``n`` sequences for each of its prompts."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

from kvrelay.core.handoff import HandoffOrder
from kvrelay.frontend.metrics import FrontendMetrics
from kvrelay.frontend.models import Model
from kvrelay.frontend.openai.plan import GenerationPlan, choice_sampling
from kvrelay.frontend.prompts import Prompt
from kvrelay.frontend.sequence import Sequence, SequenceListener


def sequences_of(
    request_id: str,
    prompts: Items[Prompt],
    plan: GenerationPlan,
    model: Model,
    listener: SequenceListener,
    metrics: FrontendMetrics,
    migration_limit: int,
    order: HandoffOrder = HandoffOrder.DECODE_FIRST,
) -> Iterator[Sequence]:
    """All choices in order: those of the first prompt, those of the second, ... Every prompt is checked at once.

    Raises PromptTooLongError, InvalidInputError.
    """
    samplings = [plan.sampling_of(len(prompt.token_ids), model.max_model_len) for prompt in prompts]
    return (
        Sequence(
            request_id,
            number * plan.n + choice,
            prompt,
            choice_sampling(sampling, choice),
            plan,
            model,
            listener,
            metrics,
            migration_limit,
            order,
        )
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings))
        for choice in range(plan.n)
    )
