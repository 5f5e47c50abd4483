"""Models in GGUF files.

``header.py`` parses a file's metadata and what it says of its tensors, without torch. ``file.py``
has the tensors by Hugging Face's names, which ``names.py`` lists. ``config.py`` and
``tokenizer.py`` turn metadata into Hugging Face's small files, and ``small_files.py`` puts those
together with the files that are beside the weights.
"""
