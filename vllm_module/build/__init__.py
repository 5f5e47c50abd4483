"""From a name or folder to a loaded model: registry, source, and ``get_model``."""
