"""``vllm-module check``: a checkpoint's tokens compared with those of transformers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

import typer

from vllm_module.base.messages import printable, printable_name
from vllm_module.cli.options import (
    AdapterOption,
    DeviceOptions,
    DTypeOptions,
    EngineRankOptions,
    JsonOption,
    LengthOption,
    ModelOptions,
    Source,
)
from vllm_module.cli.output import (
    CommandError,
    console,
    plural,
    print_json,
    print_text,
    working,
)
from vllm_module.cli.ranks import is_first_rank
from vllm_module.cli.serving import check_text, loaded_adapter, serving

PROMPTS = "The capital of France is", "def fibonacci(n):", "1, 2, 3, 4, 5,"


def check(
    source: Source,
    *,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="Text to continue; may be repeated."),
    ] = None,
    ranks: EngineRankOptions,
    tokens: Annotated[
        int,
        typer.Option("--tokens", min=1, metavar="K", help="Tokens to generate for each prompt."),
    ] = 32,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            min=0.0,
            metavar="T",
            help="Largest difference of logprobs that passes; default: 0.001 in float32, 0.05 in "
            "float16, 0.3 in bfloat16.",
            show_default=False,
        ),
    ] = None,
    dtype: DTypeOptions,
    model: ModelOptions,
    max_model_len: LengthOption = None,
    adapter: AdapterOption = None,
    devices: DeviceOptions,
    as_json: JsonOption = False,
) -> None:
    """Compare tokens with transformers'.

    The engine continues the prompts greedily, in one batch. Then transformers loads the checkpoint
    and computes the prompts with these tokens. Compared are the 20 largest logprobs at each
    position, and whether each token is the one that transformers finds most probable. A token may
    be another one where the two are equally probable, up to the tolerance. Float32 shows mistakes
    that 16 bits hide. Without a tokenizer, prompts of token ids are made up. The exit code is 1 if
    a prompt differs. Both read the same files: values that are wrong in them are wrong on both
    sides. So that nothing else is, the engine's weights are compared with the files by digests.
    With --adapter, both compute with it, transformers by PEFT.

    JSON keys: checkpoint; model_impl; transformers (its version); dtype; device;
    tensor_parallel_size; tolerance; agrees; prompts, one each (prompt or null, prompt_ids, ids,
    difference: the largest of logprobs, worst: the position of its token, the prompt's first at 0;
    others: tokens that are not transformers' first choice, gap: how far the first of them is below
    it, first_other: its position, its id and the id of transformers' choice, or null; agrees);
    weights (stored: how many tensors the files have, compared: how many of them the engine holds as
    they are stored, or cast, different: the names of those with other values).
    """
    with working("importing transformers") if is_first_rank() else nullcontext():
        from vllm_module.cli.comparison import transformers_library

        version: str = transformers_library().__version__
    texts = [check_text(text, "--prompt") for text in prompts or PROMPTS]
    with serving(
        source,
        ranks,
        dtype,
        model,
        devices,
        max_model_len=max_model_len,
    ) as llm:
        from vllm_module.cli.comparison import (
            TOLERANCES,
            compare,
            compare_weights,
            generated,
            tensors_elsewhere,
            transformers_model,
        )
        from vllm_module.cli.implementation import impl_of
        from vllm_module.cli.tensor_plan import dtype_name

        served = llm.model_config
        model_dtype, model_device, size = served.dtype, served.device, served.tensor_parallel_size
        name, folder = llm.source.name, llm.source.folder
        impl, architecture = impl_of(llm.source), llm.source.config.architectures[0]
        no_text = llm.no_tokenizer
        if llm.tokenizer is None:
            if prompts:
                raise CommandError(no_text)
            most = llm.source.config.vocab_size
            rows = [[(7 * i + 3 * j + 1) % most for j in range(5 + i)] for i in range(3)]
            named: list[str | None] = [None] * len(rows)
        else:
            rows, named = [llm.tokenizer.encode(text) for text in texts], [*texts]
        with working("generating"):
            outputs = generated(llm, rows, tokens, loaded_adapter(llm, adapter))
        with working("comparing weights with the files"):
            weights = compare_weights(llm)
            stored = tensors_elsewhere(llm.source)
    passes = TOLERANCES.get(model_dtype, 1e-3) if tolerance is None else tolerance
    with (
        working("loading by transformers"),
        transformers_model(
            folder, model_dtype, model_device, model.trust_remote_code, adapter, stored
        ) as peer,
    ):
        found = [compare(peer, output) for output in outputs]
    agrees = [each.agrees(passes) for each in found]
    right = all(agrees) and not weights.different
    if as_json:
        print_json(
            {
                "checkpoint": name,
                "model_impl": impl,
                "transformers": version,
                "dtype": model_dtype,
                "device": model_device,
                "tensor_parallel_size": size,
                "tolerance": passes,
                "agrees": right,
                "weights": weights._asdict(),
                "prompts": [
                    vars(each) | {"prompt": text, "agrees": agreeing}
                    for text, each, agreeing in zip(named, found, agrees, strict=True)
                ],
            }
        )
    else:
        out = console()
        num_ranks = plural(size, "rank")
        head = f"{architecture} in {dtype_name(model_dtype)} on {model_device}, on {num_ranks}"
        print_text(out, f"{printable(head)}, against transformers {version}", "bold")
        print_text(out, f"model_impl: {impl}")
        if no_text:
            print_text(out, f"prompts are made up: {no_text}")
        from vllm_module.core.report import fold

        shown = ", ".join(map(printable_name, fold(weights.different)))
        differ = f"DIFFER: {shown}" if shown else "bit for bit the same"
        count = f"{weights.compared} of {plural(weights.stored, 'tensor')}"
        out.print(f"{count} compared with the files: {differ}")
        out.print()
        for text, each, agreeing in zip(named, found, agrees, strict=True):
            out.print(f"{text!r}" if text else f"token ids {each.prompt_ids}", style="bold")
            same = len(each.ids) - each.others
            out.print(
                f"  {'agrees' if agreeing else 'DIFFERS'}: logprobs differ by at most "
                f"{each.difference:.2g} (allowed {passes:g}), at position {each.worst}; {same} of "
                f"{plural(len(each.ids), 'token')} are transformers' first choice"
            )
            if each.first_other is not None:
                position, own, theirs = each.first_other
                out.print(
                    f"  the first other token is {own} at position {position}, where transformers "
                    f"takes {theirs}; its logprob is {each.gap:.2g} lower"
                )
        out.print()
        out.print(f"{sum(agrees)} of {plural(len(agrees), 'prompt')} agree")
    if not right:
        raise typer.Exit(1)
