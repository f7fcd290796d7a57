"""The reference of the Python package, as pages of Markdown for Sphinx, from its docstrings. Reads source, imports nothing."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path

import griffe


def write_pages(source: Path, folder: Path) -> list[str]:
    """Writes a page for each public module of the package `source` into `folder`; returns their names."""
    logging.getLogger("griffe").setLevel(logging.ERROR)  # its advice is on annotations, a matter of type checkers
    loader = griffe.GriffeLoader(search_paths=[source.parent], allow_inspection=False, docstring_parser="google")
    package = loader.load(source.name)
    modules = [package, *(resolve(package[name]) for name in package.exports or [] if resolve(package[name]).is_module)]
    for module in modules:
        (folder / f"{module.path}.md").write_text(page(module))
    return [module.path for module in modules]


def page(module: griffe.Module) -> str:
    """All that the module exports, in the order of its `__all__`."""
    parts = [f"# `{module.path}`", docstring(module), f":::{{py:currentmodule}} {module.path}\n:::"]
    for name in map(str, module.exports or []):
        exported = resolve(module[name])
        if not exported.is_module:
            # The link of a list of contents; Sphinx makes the rest's from the directive.
            parts += [f"## {name}", entry(exported, name)]
    return joined(parts)


def entry(thing: griffe.Object, name: str) -> str:
    """A class with its documented members, or a function."""
    if not thing.has_docstring:
        raise ValueError(f"{thing.path} is exported and has no docstring")
    if not thing.is_class:
        return directive("function", signature(thing, name), docstring(thing))
    fields = [] if has_section(thing, "attributes") else list_fields(thing)
    members = [
        directive(
            "property" if member.is_attribute else "method",
            key if member.is_attribute else signature(member, key),
            docstring(member),
        )
        for key, member in thing.members.items()
        if member.is_public and member.has_docstring and not key.startswith("_")
    ]
    return directive("class", class_signature(thing, name), joined([docstring(thing), *fields, *members]), colons=4)


def list_fields(thing: griffe.Class) -> list[str]:
    """The fields of a named tuple or a dataclass that its docstring does not list."""
    if not any("NamedTuple" in str(base) for base in thing.bases):
        return []
    fields = [(name, member) for name, member in thing.members.items() if member.is_attribute and member.is_public]
    return [directive("attribute", name, f":type: {member.annotation}") for name, member in fields]


def signature(function: griffe.Function, name: str) -> str:
    return function.signature(name=name)


def class_signature(thing: griffe.Class, name: str) -> str:
    """With what its constructor takes; parameters that begin with an underscore are not for users."""
    constructor = thing.members.get("__init__")
    if constructor is None or not constructor.is_function:
        return name
    public = [p for p in constructor.parameters if p.name != "self" and not p.name.startswith("_")]
    shown = griffe.Function(name=name, parameters=griffe.Parameters(*public))
    return shown.signature(name=name)


def docstring(thing: griffe.Object) -> str:
    """The docstring's sections, in their order, as paragraphs and lists of fields."""
    if thing.docstring is None:
        return ""
    return joined([section(part) for part in thing.docstring.parsed])


def section(part: griffe.DocstringSection) -> str:
    kind = part.kind.value
    if kind == "text":
        return part.value
    if kind == "parameters":
        # Names that share a description stand before it with commas, which Sphinx would take for a type.
        names = [(name, item.description) for item in part.value for name in item.name.split(", ")]
        return "\n".join(field(f":param {name}:", description) for name, description in names)
    if kind == "attributes":
        return joined([directive("attribute", item.name, item.description) for item in part.value])
    if kind == "returns":
        return "\n".join(field(":returns:", item.description) for item in part.value)
    if kind == "raises":
        return "\n".join(field(f":raises {item.annotation}:", item.description) for item in part.value)
    raise ValueError(f"a docstring's section of kind {kind!r}: teach tools/docs/python_reference.py to show it")


def field(name: str, description: str) -> str:
    return f"{name} " + inspect.cleandoc(description).replace("\n", "\n  ")


def directive(kind: str, argument: str, content: str = "", colons: int = 3) -> str:
    fence = ":" * colons
    return joined([f"{fence}{{py:{kind}}} {argument}", content.strip()]) + fence


def has_section(thing: griffe.Object, kind: str) -> bool:
    return any(part.kind.value == kind for part in thing.docstring.parsed)


def resolve(thing: griffe.Object | griffe.Alias) -> griffe.Object:
    return thing.final_target if thing.is_alias else thing


def joined(parts: list[str]) -> str:
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"
