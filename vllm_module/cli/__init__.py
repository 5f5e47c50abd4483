"""The command line: ``vllm-module inspect | plan | load | generate | chat | bench | demo``."""

from vllm_module.cli.app import main

__all__ = ["main"]
