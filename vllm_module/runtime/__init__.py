"""The inference engine and its parts; they log under the logger ``vllm_module``."""
