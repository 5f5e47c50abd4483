"""What code from outside raises: a user's own, or that of a checkpoint that the user trusts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_module.base.messages import describe_error

# They stop what runs. All else that code from outside raises is its failure, such as sys.exit.
NO_FAILURES = KeyboardInterrupt, GeneratorExit


@contextmanager
def blamed(
    whose: str,
    kind: type[Exception],
    unchanged: tuple[type[BaseException], ...] = (),
) -> Iterator[None]:
    """Turn what code from outside raises in the block into ``kind``, with whose code it is.

    Exceptions of ``unchanged`` are not changed, nor are interrupts.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, (*NO_FAILURES, *unchanged)):
            raise
        raise kind(f"{whose}: {describe_error(error)}") from error
