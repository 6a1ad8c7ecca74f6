"""Nothing that reads a pickle is in the packages: bytes from outside must never become code.

What the standard library pickles between a process and the children it spawned itself crosses no boundary.
"""

import ast

import pytest
from tests.sources import ROOT, SOURCES, parsed

# A training sends its own children, over a private pipe, what they run: the functions that create
# their environments, the plan of their roles. Environments that are built once are asked over a socket in a folder of
# this user's alone. Ray's actors of a training get the same through Ray, or over a socket at whose other end the kernel
# shows the same user.
OWN_CHILDREN = {
    "cluster/env_workers.py",
    "cluster/local_calls.py",
    "roles/environment_host.py",
    "runtime/launching.py",
    "runtime/process.py",
    "vector/process_env.py",
    "vector/sb3_env.py",
    "vector/worker.py",
    "vector/worker_pool.py",
}
FORBIDDEN = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def findings(tree):
    """What of a source could read a pickle, each as "line: what"."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for name in names:
                    if name.name.split(".")[0] in FORBIDDEN:
                        yield f"{node.lineno}: import {name.name}"
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in FORBIDDEN:
                yield f"{node.lineno}: from {module}"
            case ast.Call(func=ast.Attribute(attr="recv_pyobj" | "send_pyobj" | "recv_serialized")):
                yield f"{node.lineno}: {node.func.attr}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                if not any(key.arg == "weights_only" and getattr(key.value, "value", None) is True for key in keywords):
                    yield f"{node.lineno}: torch.load without weights_only=True"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="np" | "numpy"), attr="load"), keywords=keywords):
                if any(key.arg == "allow_pickle" and getattr(key.value, "value", 1) is not False for key in keywords):
                    yield f"{node.lineno}: numpy.load with allow_pickle"
            case ast.Call(func=ast.Name(id="eval" | "exec")):
                yield f"{node.lineno}: {node.func.id}"


def test_nothing_reads_a_pickle():
    read = [file for file in SOURCES if "/".join(file.parts[-2:]) not in OWN_CHILDREN]
    assert len(SOURCES) - len(read) == len(OWN_CHILDREN), "one of these exists no more"
    found = {str(file.relative_to(ROOT)): list(findings(parsed(file))) for file in read}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from joblib import load", "torch.load(f)", "torch.load(f, weights_only=False)",
     "np.load(f, allow_pickle=True)", "socket.recv_pyobj()", "eval(x)"],
)  # fmt: skip
def test_the_walk_finds_its_files(source):
    assert list(findings(ast.parse(source)))


def test_there_are_sources():
    assert len(SOURCES) > 100
