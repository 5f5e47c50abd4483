"""Settings of an engine, and what loading it logs."""

from __future__ import annotations

import json
import logging
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from vllm_module import LLM, SamplingParams
from vllm_module.errors import CheckpointFormatError

# Pytest's importlib mode has no imports between test files.
ASKING: Any = runpy.run_path(str(Path(__file__).with_name("asking.py")))
write_tokenizer, SMALL, greedy = (ASKING[name] for name in ("write_tokenizer", "SMALL", "greedy"))
generated = ASKING["generated"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype"),
        ({"async_scheduling": "yes"}, "async_scheduling"),
        ({"no_such_option": 1}, "LLM has no argument 'no_such_option'$"),
        ({"tensor_paralel_size": 2}, "did you mean 'tensor_parallel_size'"),
        ({"quantisation": "fp8"}, "did you mean 'quantization'"),
        ({"data_parallel_size": 2}, "data_parallel_rank says which of them"),
        ({"load_format": "h5"}, "load_format should be 'auto', 'sharded_state', 'safetensors'"),
        ({"speculative_config": {}}, "is not supported here: leave it out$"),
        ({"generation_config": "folder"}, "generation_config should be 'auto'"),
        ({"tokenizer": "./no/such/folder"}, "no/such/folder does not exist"),
        ({"kv_cache_memory_bytes": 10}, "no memory for a page of 16 tokens, which takes 8192"),
    ],
)
def test_invalid_settings_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    """The error names the setting."""
    with pytest.raises(ValueError, match=message):
        LLM(folder, **options)


@pytest.mark.parametrize("as_list", [False, True])
def test_an_end_token_of_hf_overrides_ends_outputs(
    folder: Path, tmp_path: Path, as_list: bool
) -> None:
    """It replaces that of config.json: transformers generates the same with it in the file."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()  # which goes before, in transformers
    prompt = [5, 14, 23]
    with LLM(tmp_path, **SMALL) as llm:
        (output,) = llm.generate(prompt, greedy(8, ignore_eos=True), False)
    end = output.outputs[0].token_ids[4]
    overrides = {"eos_token_id": [end] if as_list else end}
    with LLM(tmp_path, hf_overrides=overrides, **SMALL) as llm:
        (output,) = llm.generate(prompt, greedy(8), False)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | overrides))
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert output.outputs[0].token_ids == generated(model, prompt, 8)
    assert output.outputs[0].finish_reason == "stop"


def test_arguments_of_vllm_that_change_nothing_are_accepted(theirs: Any, tmp_path: Path) -> None:
    """The tokenizer may be another folder's; a seed decides the draws of requests without one."""
    theirs.save_pretrained(tmp_path / "model")
    (tmp_path / "text").mkdir()
    write_tokenizer(tmp_path / "text")
    drawn = SamplingParams(temperature=2.0, max_tokens=9, detokenize=True, bad_words=None)
    texts = []
    for _ in range(2):
        with LLM(
            tmp_path / "model",
            tokenizer=tmp_path / "text",
            seed=5,
            dtype="float",
            max_logprobs=3,
            load_format="safetensors",
            distributed_executor_backend="mp",
            trust_remote_code=False,
            disable_log_stats=True,
            cpu_offload_gb=0,
            download_dir=str(tmp_path),
            hf_token=False,
            **SMALL,
        ) as llm:
            outputs = llm.generate(["cat", "cat"], drawn, use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
            assert llm.chat_prompt([{"role": "user", "content": "a"}])["prompt"].startswith("<s>")
            with pytest.raises(ValueError, match="4 logprobs are more than max_logprobs=3"):
                llm.generate("cat", greedy(1, logprobs=4), use_tqdm=False)
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    with LLM(tmp_path / "model", skip_tokenizer_init=True, **SMALL) as llm:
        assert llm.tokenizer is None
        assert llm.no_tokenizer == "skip_tokenizer_init is set"


def test_the_checkpoint_recommends_sampling_parameters(folder: Path, tmp_path: Path) -> None:
    """Requests without parameters use generation_config.json, unless it is not to be read."""
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    entries = {"do_sample": False, "temperature": 0.5, "top_k": 1, "top_p": None}
    path.write_text(json.dumps(entries | {"max_new_tokens": 3, "eos_token_id": 129}))
    with LLM(tmp_path / "model", **SMALL) as llm:
        params = llm.get_default_sampling_params()
        assert params == SamplingParams(temperature=0.5, top_k=1, max_tokens=3)
        assert params.model_fields_set == {"temperature", "top_k", "max_tokens"}
        (expected,) = llm.generate("fox", greedy(3), use_tqdm=False)
        outputs = llm.generate(["fox", "fox"], [None, params], use_tqdm=False)  # type: ignore[list-item]
        outputs += [list(llm.stream("fox"))[-1]]
        messages = [{"role": "user", "content": "x"}]
        outputs += llm.chat(messages, chat_template="{{ 'fox' }}", use_tqdm=False)
        for output in outputs:
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    path.write_text(json.dumps({"temperature": "hot"}))
    with pytest.raises(
        CheckpointFormatError, match=r"generation_config\.json: temperature should .*'hot'"
    ):
        LLM(tmp_path / "model", **SMALL)
    with LLM(tmp_path / "model", **SMALL, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_warnings_are_seen_where_logging_is_not_configured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python prints them on standard error, unless a handler of ours is in between."""
    monkeypatch.setattr(logging.root, "handlers", [])
    logging.getLogger("vllm_module.runtime.ranks.group").warning("waiting for rank 1")
    assert capsys.readouterr().err == "waiting for rank 1\n"


def test_loading_logs_three_lines(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The format; whose model it is; what was loaded, the time, the memory of weights and cache."""
    with caplog.at_level(logging.INFO, "vllm_module"), LLM(folder, **SMALL):
        pass
    found, whose, record = (record for record in caplog.records if record.levelname == "INFO")
    assert found.getMessage() == f"weights in {folder}: safetensors"
    assert whose.getMessage() == "model_impl of Qwen3ForCausalLM: native"
    assert re.fullmatch(
        rf"loaded in \d+\.\d s: model: {folder}; architecture: Qwen3ForCausalLM, float32; "
        r"layers: 2; device: cpu, ranks: 1; plan: tensor parallel 1, pipeline parallel 1: 1\.3 MiB "
        r"on rank 0; weights of a rank: 0\.3 MiB; cache of a rank: 128 pages of 16 tokens, 2048 in "
        r"all, 1\.0 MiB; sequences: at most 128 tokens, 16 in a step",
        record.getMessage(),
    )
