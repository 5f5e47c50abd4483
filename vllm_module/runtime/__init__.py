"""The inference engine and its parts; they log under the logger ``vllm_module``."""

import logging

logging.getLogger("vllm_module").addHandler(logging.NullHandler())
