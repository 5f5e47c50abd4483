"""Text and tokens: tokenizers, chat templates, prompts, stop strings."""
