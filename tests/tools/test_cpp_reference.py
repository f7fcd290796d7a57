"""The reference of the headers has every public declaration, each with its own comment."""

import re
from pathlib import Path

import cpp_reference
import pytest

ROOT = Path(__file__).parents[2]
HEADERS = sorted((ROOT / "include").rglob("*.h"))

HEADER = """\
// What the header is for.
//
//   int shown = as_code;
#pragma once

namespace clowder {

// A comment of nobody.

using Handle = void*;

// Colours.
// Two of them.
enum class Colour : int {
  kRed,    // warm
           // and bright
  kGreen,  // cold
};

struct Point {
  // Above.
  int x = 0;
  int y = 0;  // beside,
              // and below it
  // Of z.
  int z;
};

class CLOWDER_API Shape {
 public:
  // Makes one.
  explicit Shape(int edges = {}) : edges_(edges) {}
  Shape(const Shape&) = delete;
  virtual int area() const = 0;  // in square metres
  static Shape* find(const Point& point,
                     int edges = 3);

 private:
  // Hidden.
  int edges_;
};

class Forward;

// Opaque.
class Hidden;

// Free.
CLOWDER_API Shape* make_shape(int edges);

}  // namespace clowder
"""


def by_text(declarations):
    result = {}
    for declaration in declarations:
        result[declaration.text] = declaration.comment
        result |= by_text(declaration.members)
    return result


def test_declarations_and_their_comments():
    header = cpp_reference.read_header(HEADER)
    assert header.comment == "What the header is for.\n\n```cpp\nint shown = as_code;\n```"
    assert by_text(header.declarations) == {
        "Handle = void*": "",
        "Colour : int": "Colours.\nTwo of them.",
        "kRed": "warm\nand bright",
        "kGreen": "cold",
        "Point": "",
        "int x = 0": "Above.",
        "int y = 0": "beside,\nand below it",
        "int z": "Of z.",
        "Shape": "",
        "explicit Shape(int edges = {})": "Makes one.",
        "virtual int area() const = 0": "in square metres",
        "static Shape* find(const Point& point, int edges = 3)": "",
        "Hidden": "Opaque.",
        "Shape* make_shape(int edges)": "Free.",
    }


def test_kinds_of_declarations():
    kinds = {d.text: d.kind for d in cpp_reference.read_header(HEADER).declarations}
    assert kinds["Colour : int"] == "enum-class"
    assert kinds["Point"] == "struct"
    assert kinds["Shape"] == "class"
    assert kinds["Handle = void*"] == "type"
    assert kinds["Shape* make_shape(int edges)"] == "function"


def test_what_cannot_be_read_is_an_error():
    with pytest.raises(ValueError, match="line 3: C\\+\\+ that"):
        cpp_reference.read_header("namespace clowder {\nint a;\n%%% int b;\n}\n")


def declared_names(text):
    """Public names, found without a parser: what a line between public: and private: ends in before = ; { or ("""
    names = set()
    is_public = True
    for line in text.splitlines():
        code = re.sub(r"//.*", "", line).rstrip()
        if re.match(r"\s*(public|private|protected):", code):
            is_public = "public" in code
        elif code.startswith("}"):
            is_public = True
        elif is_public and re.match(r"(  )?[A-Za-z]", code) and not code.strip().startswith("namespace"):
            code = re.sub(r"\bCLOWDER_\w+ ", "", code)
            type_name = re.match(r"(?:struct|class|enum class) (\w+)(?:$| [:{])", code)
            value = re.match(r"  [\w:<>*&, ]*?[ *&](\w+)(?: = [^;]*)?;$", code)
            function = re.match(r"(?:  )?[\w:<>*&, ]*?[ *&](\w+)\(", code)
            enumerator = re.match(r"  (k\w+),", code)
            match = type_name or enumerator or value or function
            if match and "= delete" not in code:
                names.add(match[1])
    return names


@pytest.mark.parametrize("path", HEADERS, ids=lambda path: path.name)
def test_the_real_headers_are_complete(path):
    text = path.read_text()
    header = cpp_reference.read_header(text)
    page = cpp_reference.to_page(path.name, header)
    signatures = "\n".join(re.findall(r"^:::+\{cpp:[\w-]+\} (.*)$", page, re.MULTILINE))
    missing = [name for name in sorted(declared_names(text)) if not re.search(rf"\b{name}\b", signatures)]
    assert missing == []
    if header.declarations:
        assert len(declared_names(text)) >= len(header.declarations) / 2, "the search of this test finds too little"


@pytest.mark.parametrize("path", HEADERS, ids=lambda path: path.name)
def test_no_comment_of_a_public_declaration_is_lost(path):
    """Every line of a comment beside or above a public declaration is on the page."""
    text = re.sub(r" private:.*?^};", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    page = cpp_reference.to_page(path.name, cpp_reference.read_header(path.read_text()))
    lines = [line.strip() for line in re.findall(r"//(.*)", text) if "namespace" not in line]
    if cpp_reference.read_header(path.read_text()).declarations:
        assert [line for line in lines if line not in page] == []
