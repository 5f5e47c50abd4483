"""Steps that measure memory and compile every variant of a kernel before the first request.

Kernels are compiled at their first launch, which takes seconds. A variant is chosen by the model's
shapes and by ranges of three numbers: the tokens of a step, its sequences, and the pages of its
longest sequence. No range lies between two powers of two, so steps of every power meet every
variant. Nothing is stored in the cache, and only its first pages are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from vllm_module.runtime.pooling.embedding import EmbeddingInputs
from vllm_module.runtime.step_inputs import Moves, StepInputs

# With more tokens, the device takes longer for a step than the host to launch its kernels.
MOST_TOKENS = 2048


def captured_sizes(most: int) -> list[int]:
    """Return the numbers of tokens to capture, ascending, for steps of up to ``most`` tokens.

    They are of steps that do not only decode.
    """
    most = min(most, MOST_TOKENS)
    sizes = 16, 32, *range(64, 512, 64), *range(512, 1024, 128), *range(1024, MOST_TOKENS, 256)
    return [size for size in sizes if size < most] + [most] * (most > 0)


def warm_up_steps(
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    page_size: int,
    num_pages: int,
    host_pages: int,
) -> Iterator[StepInputs]:
    """Yield steps that meet every variant which steps within these limits can meet.

    The first step also copies a page in each direction of copying: run it before any page is
    allocated.
    """
    most_pages = -(-max_model_len // page_size)
    step = _step([1], [1], 1)
    swapped = [(0, 0)] if host_pages else []
    step.pages = Moves(swapped, [(0, 1)] if num_pages > 1 else [], swapped)
    yield step
    for pages in _powers(most_pages):  # one new token on cached pages
        yield _step([1], [min(pages * page_size, max_model_len)], pages)
    for sequences in _powers(min(max_num_seqs, max_num_batched_tokens)):  # decoding batches
        yield _step([1] * sequences, [1] * sequences, most_pages)
    for tokens in _powers(min(max_num_batched_tokens, max_num_seqs * max_model_len)):  # prompts
        counts = _lengths(tokens, max_model_len)
        yield _step(counts, counts, -(-counts[0] // page_size), max_num_seqs)


def largest_steps(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, page_size: int
) -> Iterator[StepInputs]:
    """Yield the steps that need the most memory: longest prompts, and one token of many sequences.

    Attention reads pages in both, as in every step. Attention of a whole prompt without pages would
    keep the scores of all pairs of tokens if a model has soft caps, slopes or sinks. All sequences
    use the first row of the block tables, and so the first state, the only one that exists yet.
    """
    most_pages = -(-max_model_len // page_size)
    prompts = _lengths(min(max_num_batched_tokens, max_num_seqs * max_model_len), max_model_len)
    for counts in (prompts, [1] * min(max_num_seqs, max_num_batched_tokens)):
        step = _step(counts, counts, most_pages, max_num_seqs)
        step.table_rows = [0] * len(counts)
        yield step


def warm_up_batches(
    max_num_batched_tokens: int, max_num_seqs: int, max_length: int
) -> Iterator[EmbeddingInputs]:
    """Yield the batches of an encoder that meet every variant, like :func:`warm_up_steps`."""
    most = max(max_num_batched_tokens, max_length)  # a batch may be one prompt of any length
    for tokens in _powers(min(most, max_num_seqs * max_length)):
        yield EmbeddingInputs([0] * tokens, _lengths(tokens, max_length), "mean")


def _step(
    new: list[int], contexts: list[int], pages: int, most_rows: int | None = None
) -> StepInputs:
    """Return a step that stores nothing and reads the first page in place of every other.

    Args:
        new, contexts: number of each sequence's tokens in this step, and in all.
        pages: number of pages in each block table.
        most_rows: largest number of tokens whose logits are computed; by default all.

    """
    counts = list(zip(new, contexts, strict=True))
    positions = [at for count, context in counts for at in range(context - count, context)]
    return StepInputs(
        input_ids=[0] * len(positions),
        positions=positions,
        slot_mapping=[-1] * len(positions),
        context_lens=contexts,
        query_start_loc=[0, *accumulate(new)],
        table_rows=list(range(len(new))),
        new_pages=[],  # unwritten tables have the first page everywhere
        num_table_pages=pages,
        rows=list(range(len(positions)))[:most_rows],
        max_query_len=max(new),
    )


def _powers(most: int) -> list[int]:
    """Return the powers of two up to ``most``, and ``most``."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def _lengths(tokens: int, most: int) -> list[int]:
    """Return lengths of up to ``most`` that add up to ``tokens``."""
    whole, rest = divmod(tokens, most)
    return [most] * whole + [rest] * (rest > 0)
