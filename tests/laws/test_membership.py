"""Nothing stays outside of the laws: parameters, layers and models all join them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import runpy
from pathlib import Path

import vllm_module
from vllm_module import BasevLLMParameter, layers, vLLMModule
from vllm_module.build.registry import model_class, supported_architectures
from vllm_module.parameters import ModelWeightParameter
from vllm_module.testing.configurations import architectures
from vllm_module.testing.strategies import parameter_classes

TESTS = Path(__file__).parents[1]
LAYERS = runpy.run_path(str(Path(__file__).with_name("subjects.py")))["LAYERS"]

# A model author's whole test file.
CALL = 'law({name}, model_configs("{name}")'


def shipped_parameter_classes() -> set[type[BasevLLMParameter]]:
    """Return every class of typed parameters in the package, whoever defines it."""
    for module in pkgutil.walk_packages(vllm_module.__path__, "vllm_module."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found: set[type[BasevLLMParameter]] = set()
    new = {BasevLLMParameter}
    while new:
        found |= new
        new = {sub for cls in new for sub in cls.__subclasses__()} - found
    return {cls for cls in found if cls.__module__.startswith("vllm_module.")}


def test_every_parameter_class_can_be_drawn() -> None:
    """A parameter class that is not among the shared strategies fails here."""
    assert shipped_parameter_classes() == set(parameter_classes())


def test_a_parameter_class_outside_of_the_strategies_is_seen() -> None:
    """The search above finds a class that somebody adds."""
    new = type("NewParameter", (ModelWeightParameter,), {"__module__": "vllm_module.new"})
    try:
        assert new in shipped_parameter_classes() - set(parameter_classes())
    finally:
        del new
        importlib.import_module("gc").collect()


def test_every_layer_is_held_to_the_laws() -> None:
    """Each module that models are wired from is part of a subject of the laws."""
    public = {getattr(layers, name) for name in layers.__all__}
    modules = {cls for cls in public if inspect.isclass(cls) and issubclass(cls, vLLMModule)}
    covered = {cls for subject in LAYERS.values() for cls in subject.covers}
    assert modules == covered


def test_every_architecture_is_held_to_the_laws() -> None:
    """Each registered architecture has its strategy, and a test of all laws on its class."""
    # Tests that ran before in this process may have registered models of their own.
    supported = supported_architectures()
    shipped = [n for n in supported if model_class([n]).__module__.startswith("vllm_module.models")]
    assert sorted(architectures()) == shipped
    files = [path.read_text() for path in (TESTS / "models").glob("test_*.py")]
    for architecture in architectures():
        name = model_class([architecture]).__name__
        (text,) = [text for text in files if CALL.format(name=name) in text]
        test = text[: text.index(CALL.format(name=name))].rpartition("\n\n\n")[2]
        assert test.startswith('@pytest.mark.parametrize("law", LAWS)\ndef test_'), name


def test_every_model_file_is_registered() -> None:
    """A file in models/ that the registry does not know is of no use to anybody."""
    registered = {model_class([name]).__module__.rpartition(".")[2] for name in architectures()}
    files = {path.stem for path in (TESTS.parent / "models").glob("*.py")}
    parts = {"decoder", "language_model_only", "mamba2_hybrid", "nemotron_h_mlp"}  # of models
    assert files == registered | parts
