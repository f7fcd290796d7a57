"""The reference of the C++ headers, as pages of Markdown for Sphinx, from their declarations and comments.

A comment belongs to the declaration below it, or to the one whose line it ends. Comments are Markdown; paragraphs that are
set in by two spaces are code.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tree_sitter
import tree_sitter_cpp

_PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_cpp.language()))
_KINDS = {"struct_specifier": "struct", "class_specifier": "class", "enum_specifier": "enum-class"}
# Macros that say how a symbol is exported, which is nothing to a reader.
_EXPORT_MACRO = re.compile(r"\bCLOWDER_\w*(API|EXPORT)\w* ")


@dataclass
class Declaration:
    kind: str  # of Sphinx's C++ domain
    text: str
    comment: str = ""
    members: list[Declaration] = field(default_factory=list)


@dataclass
class Header:
    comment: str
    declarations: list[Declaration]


def write_pages(include: Path, folder: Path) -> list[str]:
    """Writes a page for each header below `include` that declares something into `folder`; returns their names."""
    names = []
    for path in sorted(include.rglob("*.h")):
        header = read_header(path.read_text())
        if header.declarations:
            name = path.relative_to(include).as_posix()
            page = folder / (name.replace("/", "-") + ".md")
            page.write_text(to_page(name, header))
            names.append(page.stem)
    return names


def read_header(text: str) -> Header:
    """Declarations of all namespaces of a header, and the comment that it begins with."""
    source = _EXPORT_MACRO.sub("", text).encode()
    tree = _PARSER.parse(source)
    if not any(node.type == "namespace_definition" for node in tree.root_node.children):
        return Header("", [])
    if error := _find_error(tree.root_node):
        raise ValueError(f"line {error.start_point.row + 1}: C++ that tools/docs/cpp_reference.py cannot read")
    reader = _Reader(source)
    declarations = [
        declaration
        for node in tree.root_node.named_children
        if node.type == "namespace_definition"
        for declaration in reader.declarations(node.child_by_field_name("body"))
    ]
    return Header(reader.leading_comment(tree.root_node), declarations)


class _Reader:
    def __init__(self, source: bytes) -> None:
        self._source = source

    def leading_comment(self, root: tree_sitter.Node) -> str:
        lines = []
        for node in root.children:
            if node.type != "comment":
                break
            lines.append(self._text(node))
        return _markdown(lines)

    def declarations(self, body: tree_sitter.Node) -> Iterator[Declaration]:
        """The public ones of a namespace, a class or an enumeration, each with its comment."""
        is_public = body.parent.type != "class_specifier"
        above: list[tree_sitter.Node] = []
        pending: tuple[Declaration, tree_sitter.Node] | None = None
        beside: list[tree_sitter.Node] = []
        for node in body.named_children:
            if node.type == "comment":
                if pending and self._is_beside(node, pending[1], beside):
                    beside.append(node)
                else:
                    above = [*above, node] if above and _follows(node, above[-1]) else [node]
                continue
            if pending:
                yield self._finish(pending[0], beside)
                pending, beside = None, []
            comments, above = above, []
            if node.type == "access_specifier":
                is_public = self._text(node) == "public"
                continue
            declaration = self._declaration(node) if is_public else None
            if declaration:
                if comments and _follows(node, comments[-1]):
                    declaration.comment = _markdown([self._text(comment) for comment in comments])
                # A name without a body is of use to a reader only where a comment says what for.
                if declaration.comment or node.type not in _KINDS or node.child_by_field_name("body"):
                    pending = (declaration, node)
        if pending:
            yield self._finish(pending[0], beside)

    def _finish(self, declaration: Declaration, beside: list[tree_sitter.Node]) -> Declaration:
        if beside:
            comment = _markdown([self._text(node) for node in beside])
            declaration.comment = f"{declaration.comment}\n\n{comment}".strip()
        return declaration

    @staticmethod
    def _is_beside(comment: tree_sitter.Node, node: tree_sitter.Node, before: list[tree_sitter.Node]) -> bool:
        if before:
            return _follows(comment, before[-1]) and comment.start_point.column == before[0].start_point.column
        return comment.start_point.row == node.end_point.row

    def _declaration(self, node: tree_sitter.Node) -> Declaration | None:
        if node.type in _KINDS:
            return self._type(node)
        if node.type == "enumerator":
            return Declaration("enumerator", self._text(node))
        if node.type == "alias_declaration":
            return Declaration("type", self._text(node).removeprefix("using ").rstrip(";"))
        if node.type in ("declaration", "field_declaration", "function_definition"):
            return self._value(node)
        return None

    def _type(self, node: tree_sitter.Node) -> Declaration:
        body = node.child_by_field_name("body")
        text = self._text_until(node, body) if body else self._text(node)
        text = text.removeprefix("enum ").removeprefix("struct ").removeprefix("class ")
        return Declaration(_KINDS[node.type], text, members=list(self.declarations(body)) if body else [])

    def _value(self, node: tree_sitter.Node) -> Declaration | None:
        """A function without its body and initialisers, or a variable. Copies that are forbidden are left out."""
        is_function = _find(node, "function_declarator") is not None
        end = next((c for c in node.children if c.type in ("compound_statement", "field_initializer_list")), None)
        text = self._text_until(node, end) if end else self._text(node).rstrip(";")
        if text.endswith("= delete"):
            return None
        return Declaration("function" if is_function else "member", text)

    def _text(self, node: tree_sitter.Node) -> str:
        text = self._source[node.start_byte : node.end_byte].decode()
        return text if node.type == "comment" else re.sub(r"\s+", " ", text).strip()

    def _text_until(self, node: tree_sitter.Node, end: tree_sitter.Node) -> str:
        return re.sub(r"\s+", " ", self._source[node.start_byte : end.start_byte].decode()).strip()


def _find_error(node: tree_sitter.Node) -> tree_sitter.Node | None:
    """Nodes that the parser has made up, for a default of {}, hide no source text; unread text does."""
    if node.is_error:
        return node
    return next(filter(None, map(_find_error, node.children)), None) if node.has_error else None


def _find(node: tree_sitter.Node, kind: str) -> tree_sitter.Node | None:
    """The declarator of that kind, through pointers and references."""
    while node is not None and node.type != kind:
        inner = node.child_by_field_name("declarator")
        wrapped = [child for child in node.named_children if child.type.endswith("_declarator")]
        node = inner or (wrapped[0] if wrapped else None)
    return node


def _follows(node: tree_sitter.Node, before: tree_sitter.Node) -> bool:
    return node.start_point.row == before.end_point.row + 1


def _markdown(comments: list[str]) -> str:
    lines = [comment.removeprefix("//").removeprefix(" ") for comment in comments]
    paragraphs = re.split(r"\n[ \t]*\n", "\n".join(lines))
    is_code = [all(line.startswith("  ") for line in p.splitlines()) for p in paragraphs]
    fenced = [f"```cpp\n{textwrap.dedent(p)}\n```" if code else p for p, code in zip(paragraphs, is_code)]
    return "\n\n".join(fenced).strip()


def to_page(name: str, header: Header) -> str:
    """Names of types first, then types, then functions; each in the header's order."""
    types = [d for d in header.declarations if d.members]
    functions = [d for d in header.declarations if d.kind == "function"]
    others = [d for d in header.declarations if not d.members and d.kind != "function"]
    parts = [f"# `{name}`", header.comment, ":::{cpp:namespace} clowder\n:::", *map(_directive, others)]
    for declaration in types:
        parts += [f"## {re.split('[ :]', declaration.text)[0]}", _directive(declaration)]
    if functions:
        parts += ["## Functions", *map(_directive, functions)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _directive(declaration: Declaration) -> str:
    fence = "::::" if declaration.members else ":::"
    opening = f"{fence}{{cpp:{declaration.kind}}} {declaration.text}"
    return (
        "\n\n".join(filter(None, [opening, declaration.comment, *map(_directive, declaration.members)])) + f"\n{fence}"
    )
