"""LFM2-VL, text only: LFM2."""

from vllm_module.models.language_model_only import LanguageModelOnly, LanguageModelOnlyConfig
from vllm_module.models.lfm2 import Lfm2Config, Lfm2ForCausalLM


class Lfm2VlConfig(Lfm2Config, LanguageModelOnlyConfig):
    pass


class Lfm2VlForConditionalGeneration(LanguageModelOnly, Lfm2ForCausalLM):
    config_class = Lfm2VlConfig
