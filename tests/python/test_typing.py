"""What type checkers and readers rely on: the stub of the extension, annotations and docstrings."""

import ast
import importlib.metadata
import inspect
import re
from pathlib import Path

import pytest

import clowder
from clowder import _core

PACKAGE = Path(clowder.__file__).parent
STUB = ast.parse((PACKAGE / "_core.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}


def public(names):
    return {name for name in names if not name.startswith("_")}


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


def test_the_stub_has_the_extensions_names():
    assert set(CLASSES) == public(vars(_core))


def stub_members(node):
    functions = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
    values = {target.id for child in node.body if isinstance(child, ast.Assign) for target in child.targets}
    return functions | values


@pytest.mark.parametrize("name", CLASSES)
def test_the_stub_has_the_members_of(name):
    real = getattr(_core, name)
    is_enum = hasattr(real, "__members__")
    members = set(real.__members__) if is_enum else public(vars(real))
    assert public(stub_members(CLASSES[name])) == members


def normal(text):
    """A signature without what differs in spelling only."""
    text = re.sub(r"clowder\._core\.|collections\.abc\.", "", text)
    text = re.sub(r" = [^,)]+", " = ...", text)  # values of defaults
    return re.sub(r"\s+", " ", text)


def real_signature(function):
    return normal(function.__nb_signature__[0][0])


METHODS = [
    (name, child)
    for name, node in CLASSES.items()
    for child in node.body
    if isinstance(child, ast.FunctionDef) and not child.decorator_list
]


@pytest.mark.parametrize(("name", "method"), METHODS, ids=lambda value: getattr(value, "name", value))
def test_the_stub_has_the_signature_of(name, method):
    written = f"def {method.name}({ast.unparse(method.args)}) -> {ast.unparse(method.returns)}"
    written = re.sub(r"=(?! )", " = ", written.replace(" = ", "="))
    assert normal(written) == real_signature(getattr(getattr(_core, name), method.name))


def functions_of(module):
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value):
            yield value
        elif inspect.isclass(value):
            yield from (member for member in vars(value).values() if inspect.isfunction(member))


MODULES = [
    clowder.errors,
    clowder.functional,
    clowder.group,
    clowder.workspace,
    clowder.engine,
    clowder.weights,
    clowder.checks,
    clowder.nn.moe,
    clowder.nn.router,
    clowder.nn.experts,
    clowder.nn.checkpoint,
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_function_is_annotated(module):
    for function in functions_of(module):
        if not function.__module__.startswith("clowder"):
            continue
        for parameter in list(inspect.signature(function).parameters.values()):
            if parameter.name not in ("self", "cls"):
                assert parameter.annotation is not inspect.Parameter.empty, (function.__qualname__, parameter.name)
        assert inspect.signature(function).return_annotation is not inspect.Signature.empty, function.__qualname__


def arguments_in(docstring):
    section = re.search(r"^ *Args:\n(.*?)(?:\n\s*\n|\Z)", docstring, re.DOTALL | re.MULTILINE)
    lines = section.group(1).splitlines() if section else []
    indentation = min(len(line) - len(line.lstrip()) for line in lines) if lines else 0
    heads = [line.split(":")[0].strip() for line in lines if len(line) - len(line.lstrip()) == indentation]
    return {name.strip() for head in heads for name in head.split(",")}


PUBLIC = [
    clowder.forward,
    clowder.backward,
    clowder.moe,
    clowder.Workspace,
    clowder.Workspace.build_schedule,
    clowder.VirtualGroup,
    clowder.nn.MoE,
    clowder.nn.SoftmaxRouter,
    clowder.nn.DeepSeekV3Router,
    clowder.nn.DeepSeekV3Router.update_bias,
]


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda thing: thing.__qualname__)
def test_docstrings_name_every_argument(thing):
    parameters = inspect.signature(thing).parameters
    names = {name for name in parameters if name != "self" and not name.startswith("_")}
    assert arguments_in(inspect.getdoc(thing)) == names


def test_every_public_name_has_a_docstring():
    for name in clowder.__all__:
        assert inspect.getdoc(getattr(clowder, name)), name
    for name in clowder.nn.__all__:
        assert inspect.getdoc(getattr(clowder.nn, name)), name


def test_metadata():
    metadata = importlib.metadata.metadata("clowder-moe")
    assert metadata["Author"] == "Clowder authors" or "Clowder authors" in (metadata["Author-email"] or "")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
