"""Chat requests with their answers, and how to match them to answers that a rollout recorded itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outpace.rollouts.history_digests import comparable_message
from outpace.types import Answer, Message


class AnsweredChat(NamedTuple):
    """A chat request with its answer. The messages are an immutable copy of those that were sent."""

    messages: Sequence[Message]
    answer: Answer

    def is_recorded_as(self, messages: Sequence[Message]) -> bool:
        """Whether `messages` mean the same as this request followed by its answer. Tools are not compared."""
        own = [*self.messages, self.answer.message]
        return len(own) == len(messages) and all(
            comparable_message(mine) == comparable_message(given) for mine, given in zip(own, messages, strict=True)
        )


def match_answers(
    answered: Sequence[AnsweredChat], recorded: Sequence[tuple[str, Sequence[Message]]]
) -> list[AnsweredChat | None]:
    """Match each recorded answer to a request, by request id first, else by messages: those of the request and its
    answer. Each request is matched at most once; None marks an answer without a match."""
    left = {each.answer.request_id: each for each in answered}
    by_id = [left.pop(request_id, None) for request_id, _ in recorded]
    found: list[AnsweredChat | None] = []
    for known, (_, messages) in zip(by_id, recorded, strict=True):
        alike = (request_id for request_id, each in left.items() if known is None and each.is_recorded_as(messages))
        request_id = next(alike, None)
        found.append(known if request_id is None else left.pop(request_id))
    return found
