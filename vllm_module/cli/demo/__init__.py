"""``vllm-module demo``: everything, shown and checked on a small checkpoint."""
