"""Models in GGUF files.

``header.py`` parses a file's metadata and what it says of its tensors, without torch. ``file.py``
has the tensors by Hugging Face's names, which ``names.py`` lists. ``metadata.py`` looks keys and
tensors up; ``config.py``, ``rope.py`` and ``tokenizer.py`` turn them into Hugging Face's small
files, and ``small_files.py`` puts those together with the files that are beside the weights.
"""
