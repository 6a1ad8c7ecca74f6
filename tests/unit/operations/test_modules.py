"""Modules import each other in no circle, and none uses another's private names."""

from __future__ import annotations

import ast
import functools

from tests.sources import ROOT, SOURCES, parsed

FILES = [path for path in SOURCES if "_pb2" not in path.stem]


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules():
    """The parsed modules by name; not parsed by every worker that only collects these tests."""
    return {name_of(path): parsed(path) for path in FILES}


# Of other projects, which offer no public name for it.
FOREIGN = {"_exit", "_run_exitfuncs", "_replace", "_get_running_loop", "_inductor", "_NormBase", "_foreach_copy_"} | {
    "_is_owned", "_get_torch_save_params", "_cumulative_rewards", "_foreach_add_",
    "_schema", "_version", "_foreach_lerp_", "_model_start_epoch_action", "_model_end_epoch_action", "_model_train_step"
}  # fmt: skip


def imported(tree):
    """The Jurybox modules that a module imports, also in functions, but not for the type checker alone."""
    found, waiting = set(), [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {each if each in modules() else node.module for each in inner}
        waiting += (inner for inner in ast.iter_child_nodes(node) if not isinstance(inner, ast.expr))
    return found & modules().keys()


def test_no_modules_import_each_other_in_a_circle():
    left = {name: imported(tree) - {name} for name, tree in modules().items()}
    while free := {name for name, needs in left.items() if not needs & left.keys()}:
        left = {name: needs for name, needs in left.items() if name not in free}
    assert left == {}, "these, or what they import, are in a circle"


def test_no_module_uses_a_private_name_of_another():
    reached = []
    for name, tree in modules().items():
        nodes = list(ast.walk(tree))
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
        own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        of_self = [
            node
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
        ]
        own |= {node.attr for node in of_self} | {node.value for node in nodes if isinstance(node, ast.Constant)}
        for node in set(nodes) - set(of_self):
            used = [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jurybox"):
                used = [alias.name for alias in node.names]
            private = {each for each in used if each.startswith("_") and not each.startswith("__")}
            reached += [f"{name}:{node.lineno} {each}" for each in private - own - FOREIGN]
    assert reached == []
