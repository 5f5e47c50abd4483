"""Building and loading models: the registry, model sources, and ``get_model``."""
