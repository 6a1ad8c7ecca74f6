"""native.pyi matches the native part: it is compared with the output of nanobind's own generator.

The stub is written by hand for its types; names and the order of parameters must be the generator's.
"""

import ast
from pathlib import Path

import pytest

stubgen = pytest.importorskip("nanobind.stubgen")
native = pytest.importorskip("jurybox.native")

STUB = Path(__file__).parents[3] / "native" / "jurybox" / "native.pyi"


def outline(text):
    """By dotted name: "class", "value" (a property too), or a function's parameters and how many have defaults."""
    found = {}

    def visit(body, before):
        for node in body:
            match node:
                case ast.ClassDef(name=name):
                    found[before + name] = "class"
                    visit(node.body, f"{before}{name}.")
                case ast.FunctionDef(name=name, args=args):
                    if any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in node.decorator_list):
                        found.setdefault(before + name, []).append(len(args.args))
                    elif node.decorator_list:
                        found[before + name] = "value"
                    else:
                        found[before + name] = [each.arg for each in args.args], len(args.defaults)
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                    found[before + name] = "value"

    visit(ast.parse(text).body, "")
    return found


def test_the_stub_matches_the_generators_output():
    generated = stubgen.StubGen(native)
    generated.put(native)
    there, said = outline(generated.get()), outline(STUB.read_text(encoding="utf-8"))
    assert len(there) > 100
    assert there.keys() - said.keys() == set(), "missing in native.pyi"
    assert said.keys() - there.keys() == set(), "in native.pyi alone"
    # Calls that skip nanobind for speed are slots without a signature to the generator.
    differ = {name: (told, there[name]) for name, told in said.items() if there[name] not in (told, "value")}
    assert differ == {}, "in native.pyi, and in truth"


def test_a_parameter_of_another_name_would_be_found():
    assert outline("class A:\n    def f(self, x: int) -> None: ...") != outline("class A:\n    def f(self, y): ...")
