"""``vllm-module shard``: write each rank's part of a model, as it is held."""

from __future__ import annotations

from vllm_module.cli.options import (
    JsonOption,
    ModelOptions,
    OutOption,
    PrecisionOptions,
    SimulatedRankOptions,
    Source,
    check_out,
    model_config,
)
from vllm_module.cli.output import console, print_json, print_table, size, working, writing


def shard(
    source: Source,
    *,
    out: OutOption,
    ranks: SimulatedRankOptions,
    precision: PrecisionOptions,
    model: ModelOptions,
    as_json: JsonOption = False,
) -> None:
    """Write what each rank holds after loading.

    The ranks are loaded one after another on the CPU. A load of DIR on as many ranks reads each
    rank's files from beginning to end, and neither cuts nor quantizes again.

    JSON keys: out; tensor_parallel_size; dtype; quantization (settings, config.json where that says
    it, or null); ranks (rank, bytes, files).
    """
    check_out(out)
    config = model_config(source, precision, model, ranks.enable_expert_parallel)
    nbytes: list[int] = []
    with working("importing torch") as show:
        # Imported here because usage errors and help need no torch.
        from vllm_module.export.sharded_state import shard as write_ranks
        from vllm_module.weights.sharded_state import shard_name

        def written(rank: int, of_rank: int) -> None:
            nbytes.append(of_rank)
            show(f"wrote rank {rank} of {ranks.tp}")

        show("loading rank 0")
        with writing(out):
            manifest = write_ranks(
                config, ranks.tp, out, load_format=model.load_format.value, on_rank=written
            )
    written_ranks = [
        {
            "rank": rank,
            "bytes": of_rank,
            "files": [shard_name(rank, part) for part in range(len(manifest.ranks[rank]))],
        }
        for rank, of_rank in enumerate(nbytes)
    ]
    if as_json:
        print_json(
            {
                "out": str(out),
                "tensor_parallel_size": ranks.tp,
                "dtype": manifest.dtype,
                "quantization": manifest.quantization,
                "ranks": written_ranks,
            }
        )
        return
    rows = [[str(r), size(n), str(len(manifest.ranks[r]))] for r, n in enumerate(nbytes)]
    print_table(console(), ["rank", "bytes", "files"], rows, right=range(3))
