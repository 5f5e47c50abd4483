"""A checkpoint's logprobs and greedy tokens here, beside those of transformers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_module.base.messages import describe_error, install, printable
from vllm_module.cli.output import CommandError, plural
from vllm_module.cli.tensor_plan import dtype_name
from vllm_module.core.fit import converts
from vllm_module.errors import WeightLoadError
from vllm_module.layout import StoredTensorLayout, layout_of_shards
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.weights.digests import digest_weight

if TYPE_CHECKING:
    from vllm_module.build.model_source import ModelSource
    from vllm_module.runtime.llm import LLM
    from vllm_module.runtime.outputs import RequestOutput
    from vllm_module.weights import Weight

_MOST = 20  # logprobs of a position that are compared: the most probable ones
# By dtype: what two right implementations may differ by, in logprobs of about -1 to -20.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}


@dataclass(frozen=True)
class Compared:
    """One prompt.

    Attributes:
        prompt: its text; ``None`` if it was given as token ids.
        prompt_ids, ids: its tokens, and those generated here, greedily.
        difference: the largest one between logprobs, at all positions.
        worst: the position where that is, of the token that the logprobs are for; the first token
            of the prompt is at 0.
        others: how many tokens are not those that transformers finds most probable after the
            tokens before.
        gap: by how much the logprob of the first one of ``others`` is below that of the most
            probable token, in transformers; 0 if there are none.
        first_other: of that one, its position, its id, and transformers' first choice there.

    """

    prompt: str | None
    prompt_ids: list[int]
    ids: list[int]
    difference: float
    worst: int
    others: int
    gap: float
    first_other: tuple[int, int, int] | None

    def agrees(self, tolerance: float) -> bool:
        """Tell whether logprobs agree, and tokens do except where two are as probable."""
        return self.difference <= tolerance and self.gap <= tolerance


def generated(
    llm: LLM, prompts: Sequence[list[int]], tokens: int, adapter: str | None = None
) -> list[RequestOutput]:
    """Return our greedy tokens, with the logprobs of prompts and tokens."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        ignore_eos=True,
        logprobs=_MOST,
        prompt_logprobs=_MOST,
    )
    given = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(given, params, use_tqdm=False, lora_request=[adapter] * len(prompts))
    for output in outputs:
        if output.error:
            raise CommandError(f"a prompt of {len(output.prompt_token_ids)} tokens: {output.error}")
    return outputs


class ComparedWeights(NamedTuple):
    """The tensors of a checkpoint that an engine holds as they are stored, or cast.

    Attributes:
        stored: how many tensors the files have.
        compared: how many of them have the same shape and kind of dtype in the engine.
        different: the names of those that have other values there.

    """

    stored: int
    compared: int
    different: list[str]


def compare_weights(llm: LLM) -> ComparedWeights:
    """Compare digests of what the engine's ranks hold with those of the files, read again.

    Tensors that loading quantizes, or puts together with others, have no digest in common.
    """
    digest = llm.digest()
    tensors = digest.tensors
    compared, different = 0, []
    with llm.source.open() as checkpoint:
        of_engine = _names_in_engine(llm, checkpoint, tensors.keys())
        for stored, weight in checkpoint.items():
            name = of_engine.get(stored, stored)
            boxes = digest.boxes.get(name)
            held = next(iter(boxes.values())) if boxes else None
            if held is None or held.shape != tuple(weight.shape):
                continue
            if held.dtype != weight.dtype and not (converts(held.dtype) and converts(weight.dtype)):
                continue
            compared += 1
            if tensors[name] != digest_weight(weight, held.dtype).hex:
                different.append(stored)
        return ComparedWeights(len(checkpoint), compared, different)


def _names_in_engine(llm: LLM, checkpoint: Mapping[str, Weight], known: Set[str]) -> dict[str, str]:
    """Return by a tensor's name in the files its name in the engine's tree, where they differ.

    A model has aliases for other names. Both names fill the same slot of the same parameter.
    """
    if checkpoint.keys() <= known:
        return {}
    stored = (
        StoredTensorLayout(name, tuple(each.shape), dtype_name(each.dtype), name, 0)
        for name, each in checkpoint.items()
    )
    files = layout_of_shards(stored, 1, lambda _, shape, rank: ((0,) * len(shape), shape))
    try:
        theirs, own = llm.layout(files), llm.layout()
    except WeightLoadError:  # weights that are packed in the files have no layout in this dtype
        return {}
    names = {
        (entry.parameter, entry.slot, expert): name
        for name, entry, expert in own.names()
        if entry.tied_to is None
    }
    found = (
        (name, names.get((entry.parameter, entry.slot, expert)))
        for name, entry, expert in theirs.names()
        if entry.tied_to is None
    )
    return {name: here for name, here in found if here is not None}


def tensors_elsewhere(source: ModelSource) -> dict[str, torch.Tensor] | None:
    """Read all tensors whose files are not in the source's folder, as those of a URL are not."""
    kinds = "*.safetensors", "*.bin"
    if any(True for kind in kinds for _ in source.source.folder.glob(kind)):
        return None
    with source.open() as checkpoint:
        return {name: weight.read() for name, weight in checkpoint.items()}


def transformers_library() -> Any:
    """Return transformers, which has few hints. Raises ``CommandError`` if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise CommandError(f"check compares with transformers: {install('transformers')}") from None
    return transformers


@contextmanager
def transformers_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    adapter: Path | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
) -> Iterator[Any]:
    """Load the model by transformers, with its own attention, and free it at the end.

    It reads the files of ``folder``, or is given ``tensors`` where these have another source.

    With ``trust_remote_code``, it runs code of the checkpoint where that has some. An ``adapter``
    is loaded by PEFT.

    Raises ``CommandError`` if transformers or PEFT is not installed or refuses the model.
    """
    library = transformers_library()
    library.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    try:
        options = {
            "dtype": dtype,
            "attn_implementation": "eager",
            "output_loading_info": True,
            "trust_remote_code": trust_remote_code,
        }
        auto: Any = library.AutoModelForCausalLM
        where: Path | None = folder
        if tensors is not None:  # given a class of its own, it asks for no file
            config = library.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            with torch.device("meta"):
                built = auto.from_config(config, trust_remote_code=trust_remote_code)
            auto, where = type(built), None
            options |= {"config": config, "state_dict": tensors}
        model, info = auto.from_pretrained(where, **options)
    except Exception as error:  # it raises all kinds
        reason = describe_error(error)
        raise CommandError(f"transformers does not load {printable(folder)}: {reason}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise CommandError(
            f"transformers fills {plural(len(missing), 'tensor')} with random numbers, so there is "
            f"nothing to compare with: {', '.join(missing[:3])}"
        )
    if adapter is not None:
        model = _with_adapter(model, adapter)
    yield model.to(device).eval()


def _with_adapter(model: Any, adapter: Path) -> Any:
    try:
        import peft
    except ImportError:
        raise CommandError(f"an adapter is compared with PEFT's: {install('peft')}") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft.PeftModel.from_pretrained(model, adapter)
    except Exception as error:  # it raises all kinds
        reason = describe_error(error)
        raise CommandError(f"PEFT does not load {printable(adapter)}: {reason}") from error


@torch.inference_mode()
def compare(model: Any, output: RequestOutput) -> Compared:
    """Compare with one forward pass of transformers over the prompt and our tokens.

    If each token is the most probable one after those before it, then greedy decoding by
    transformers gives the same tokens.
    """
    (sample,) = output.outputs
    prompt, ids = list(output.prompt_token_ids), list(sample.token_ids)
    row = torch.tensor([prompt + ids], device=next(model.parameters()).device)
    logits = model(input_ids=row, use_cache=False).logits[0].float()
    theirs = torch.log_softmax(logits, -1)[:-1].cpu()
    ours = [*(output.prompt_logprobs or [None])[1:], *(sample.logprobs or ())]
    assert len(ours) == len(theirs), "each token but the first has logprobs"
    difference, worst = 0.0, 1
    for position, (row_of, at) in enumerate(zip(ours, theirs, strict=True), 1):
        assert row_of is not None
        listed = torch.tensor([*row_of])
        own = torch.tensor([each.logprob for each in row_of.values()])
        distance = _distance(own, at[listed])
        if distance > difference:
            difference, worst = distance, position
    chosen = theirs[len(prompt) - 1 :]
    below = chosen.amax(-1) - chosen.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    others, first_other, gap = (below > 0).nonzero().flatten().tolist(), None, 0.0
    if others:
        (first, *_), gap = others, float(below[others[0]])
        first_other = len(prompt) + first, ids[first], int(chosen[first].argmax())
    return Compared(output.prompt, prompt, ids, difference, worst, len(others), gap, first_other)


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference; NaN and infinities on one side are infinitely far."""
    same = ours == theirs
    far = (ours - theirs).abs().masked_fill(same, 0.0)
    return float(far.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
