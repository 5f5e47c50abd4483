"""The idea: modules that plan what fills them, and plans that are run."""
