"""Reading models in GGUF files.

``header.py`` parses a file's metadata and its entries of tensors, without torch. ``file.py``
tensors up; ``config.py``, ``rope.py`` and ``tokenizer.py`` turn them into Hugging Face's small
files, and ``small_files.py`` puts those together with the files that are beside the weights.
"""
