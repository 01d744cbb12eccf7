"""What became of one event."""

from __future__ import annotations

from dataclasses import dataclass

from vlbatch import VlbatchError
from vlbatch.replay.oracle import ObservedStep
from vlbatch.replay.step_run import StepRun


@dataclass(slots=True)
class Outcome:
    """What became of an event.

    Attributes:
        refused: the refusal, if it was one.
        no_op: the refusal may be taken as "nothing to do".
        also_named: a second name that the format gives to this refusal.
        run: the step, if it was one.
        fit: the answer, if it was a question.

    """

    refused: VlbatchError | None = None
    no_op: bool = False
    also_named: str | None = None
    run: StepRun | None = None
    fit: dict[str, int] | None = None

    @property
    def seen(self) -> ObservedStep:
        """The step; an empty one for every other event."""
        return ObservedStep() if self.run is None else self.run.seen


def names_of(error: BaseException) -> set[str]:
    """Names of an error's class and of its bases."""
    return {cls.__name__ for cls in type(error).__mro__}
