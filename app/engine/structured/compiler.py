"""Sequences whose grammar is being compiled: beside the engine's steps, before a sequence queues.

In: sequences with a grammar, from any thread. Out: each once, with its constraint or the reason why it has none. Rule:
a sequence that is taken back meanwhile does not come out. No step waits for a compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from app.engine.batch import TokenMasks
from app.engine.errors import EngineFailure, PolyloraError
from app.engine.sequence import Sequence
from app.engine.structured.masks import Constraint, MaskMaker, Matcher


class Grammars(Protocol):
    """The tokens of a model, and what grammars make of them (`guidance.Vocabulary`)."""

    num_words: int

    def matcher(self, grammar: str, tenant_id: str) -> Matcher: ...


#: Takes a sequence that may queue now, or with an error cannot. On the compiler's thread.
OnCompiled = Callable[[Sequence, PolyloraError | None], None]


class GrammarCompiler:
    """One thread, which loads the vocabulary first."""

    def __init__(self, load: Callable[[], Grammars], on_compiled: OnCompiled) -> None:
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._vocabulary = self._thread.submit(load)
        self._on_compiled = on_compiled
        self._waiting: dict[str, Sequence] = {}  # by request id; single operations only, they are atomic
        self._masks: MaskMaker | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def take(self, sequence: Sequence) -> None:
        """Compile a sequence's grammar and let it catch up with the tokens it comes with."""
        self._waiting[sequence.request_id] = sequence
        self._thread.submit(self._compile, sequence)

    def take_back(self, request_id: str) -> Sequence | None:
        """A sequence that is still here, and will not come out any more."""
        return self._waiting.pop(request_id, None)

    def masks(self, drawing: list[Sequence]) -> TokenMasks | None:
        """Begin with a step's masks (`MaskMaker.start`)."""
        if self._masks is None:
            if all(sequence.constraint is None for sequence in drawing):
                return None
            self._masks = MaskMaker(self._vocabulary.result().num_words)
        return self._masks.start(drawing)

    def wait_for_masks(self) -> None:
        if self._masks is not None:
            self._masks.wait()

    def close(self) -> None:
        self._waiting.clear()
        self._thread.shutdown(cancel_futures=True)
        if self._masks is not None:
            self._masks.close()

    def _compile(self, sequence: Sequence) -> None:
        error: PolyloraError | None = None
        try:
            matcher = self._vocabulary.result().matcher(sequence.request.sampling.grammar, sequence.tenant_id)
            if sequence.finish_reason() is None:
                matcher.consume(list(sequence.request.resume_token_ids))
            sequence.constraint = Constraint(matcher, num_seen=len(sequence.request.resume_token_ids))
        except PolyloraError as found:
            error = found
        except Exception as found:  # of the vocabulary, or of the grammar's library
            error = EngineFailure(f"the grammar could not be compiled: {type(found).__name__}: {found}")
        if self._waiting.pop(sequence.request_id, None) is sequence:
            self._on_compiled(sequence, error)
