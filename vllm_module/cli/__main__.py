"""``python -m vllm_module.cli``."""

import sys

from vllm_module.cli import main

sys.exit(main())
