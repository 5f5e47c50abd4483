"""Text to tokens and back: tokenizers, chat templates, prompts, stop strings."""
