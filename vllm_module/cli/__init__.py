"""The command line: ``vllm-module COMMAND``, whose commands are in ``app``."""

from vllm_module.cli.entry import main

__all__ = ["main"]
