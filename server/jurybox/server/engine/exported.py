"""Exported programs, whose operations are called one after another without the Python code of modules.

A call of a small module on a CPU is mostly Python: each layer's `__call__` checks for hooks, and each parameter is
looked up in several dictionaries. `torch.export` (https://docs.pytorch.org/docs/stable/export.html) records the
operations of a forward for any number of rows. Here one loop runs them, with the parameters among its
constants. It calls the same operations and computes the same bytes; nothing is compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from jurybox.protocol.errors import plain, said
from jurybox.protocol.spec import TensorSpec
from jurybox.server.engine.batch_shapes import drawn
from jurybox.server.engine.modules import given_tensor, takes_names

_TRIED = (1, 2, 3)  # numbers of rows, besides the largest batch, on which the function is compared with the module
_ROWS = 4  # rows that are exported, at most: torch.export does not generalize from one
_OPERATORS = tuple(value for value in vars(operator).values() if callable(value))
_OVERLOAD: type[Any] = type(torch.ops.aten.tanh.default)


class NotDirect(Exception):
    """The operations of a program cannot be called directly; the message states the reason."""


class Direct(torch.nn.Module):
    """A module and the function that calls its operations.

    The function holds the module's parameters and buffers themselves, so it computes with new weights when they are
    written to these tensors, or when the tensors are pointed at other memory.

    Args:
        module: kept as `_orig_mod`, the name that torch uses.
        program: the exported module.
        inputs: the inputs' specs, in the order of the module's arguments.
        most: rows of the largest batch.
        tensors: the program's parameters and buffers by name; they belong to the module.

    Raises:
        NotDirect: the program changes its buffers or inputs, is for certain numbers of rows only, or has inputs,
            outputs or operations of another kind.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        program: torch.export.ExportedProgram,
        inputs: Mapping[str, TensorSpec],
        most: int,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__()
        names = names_of(program, list(inputs))
        self._orig_mod = module
        self._by_name = takes_names(module, list(inputs))
        _require_any_batch(program, inputs, names, most)
        # An attribute of the instance, which `__call__` prefers to the method of its class.
        self.forward = _function(program, list(inputs), names, tensors)

    def eval(self) -> Direct:
        """Do nothing: the operations were recorded in evaluation mode."""
        return self

    def compare(
        self,
        inputs: Mapping[str, TensorSpec],
        most: int,
        device: torch.device,
        example: Callable[[int], Mapping[str, Any]] | None = None,
        compute: torch.dtype | None = None,
    ) -> Direct:
        """Compare with the module on a few batches, of random rows if there is no example; return itself.

        Raises:
            NotDirect: an output differs in one byte, or the module raises an error.
        """
        for rows in sorted({min(rows, most) for rows in (*_TRIED, most)}):
            found = []
            try:
                given = {key: value.to(device) for key, value in rows_of(rows, inputs, example, compute).items()}
                for module in (self._orig_mod, self):
                    copies = {key: value.clone() for key, value in given.items()}
                    with torch.inference_mode():
                        found.append(flat(module(**copies) if self._by_name else module(*copies.values())))
            except Exception as error:
                raise NotDirect(f"it raised {said(error)}") from error
            if len(found[0]) != len(found[1]) or not all(map(_same, *found)):
                raise NotDirect(f"with {rows} rows its operations compute something else than its forward")
        return self


def export(
    module: torch.nn.Module,
    inputs: Mapping[str, TensorSpec],
    most: int,
    device: torch.device,
    example: Callable[[int], Mapping[str, Any]] | None = None,
    compute: torch.dtype | None = None,
) -> Direct:
    """Export a module and return it with the function that calls its operations.

    Args:
        most: rows of the largest batch.
        device: the module's device.
        example: returns n rows of every input by name; None: random ones are made up.
        compute: the dtype of inputs that are floating-point numbers; None: that of their spec.

    Raises:
        NotDirect: torch.export refuses the module, or `Direct` does; the message states the reason.
    """
    if any(callable(getattr(type(module), method, None)) for method in ("sleep", "wake")):
        raise NotDirect("it has a method sleep or wake, which may replace its tensors")
    rows = {key: value.to(device) for key, value in rows_of(min(most, _ROWS), inputs, example, compute).items()}
    batch = {0: torch.export.Dim("batch", min=1, max=most)} if most > 1 else {}
    by_name = takes_names(module, list(inputs))
    given: tuple[tuple[Any, ...], dict[str, Any]] = ((), rows) if by_name else (tuple(rows.values()), {})
    shapes = dict.fromkeys(rows, batch) if by_name else tuple(batch for _ in rows)
    try:
        with torch.no_grad():
            program = torch.export.export(module, *given, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        lines = [line.strip() for line in plain(error).splitlines() if line.strip()]
        raise NotDirect(f"torch.export refuses it: {' '.join(lines[:2])[:400]}") from error
    return Direct(module, program, inputs, most, tensors_of(module)).compare(inputs, most, device, example, compute)


def rows_of(
    rows: int,
    inputs: Mapping[str, TensorSpec],
    example: Callable[[int], Mapping[str, Any]] | None = None,
    compute: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """Return n rows of every input: the example's, otherwise random numbers; zeros where they may be indices."""
    given = example(rows) if example else {}
    generator = torch.Generator().manual_seed(rows)
    made = {}
    for key, spec in inputs.items():
        value = given_tensor(given[key]) if key in given else drawn(spec, rows, generator)
        if value is None:
            value = given_tensor(spec.zeros(rows))
        made[key] = value.to(compute) if compute is not None and value.is_floating_point() else value
    return made


def names_of(program: torch.export.ExportedProgram, inputs: Sequence[str]) -> list[str]:
    """Return the input of each of a program's arguments: positional ones in the order of `inputs`, others by name."""
    arguments, keywords = program.example_inputs or ((), {})
    return [*list(inputs)[: len(arguments)], *map(str, keywords)]


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers by name, with all names of those that it shares."""
    return {
        **dict(module.named_buffers(remove_duplicate=False)),
        **dict(module.named_parameters(remove_duplicate=False)),
    }


# ----
# From a program to a function


def _require_any_batch(
    program: torch.export.ExportedProgram, inputs: Mapping[str, TensorSpec], names: Sequence[str], most: int
) -> None:
    """Raise NotDirect unless a program computes batches of 1 to `most` rows of these shapes.

    The module of a program checks that for each call. The function does not, so here it is checked for all of them.
    """
    signature = program.graph_signature
    if any(spec.kind != OutputKind.USER_OUTPUT for spec in signature.output_specs):
        raise NotDirect("it changes its buffers or its inputs")
    arguments = [spec.arg for spec in signature.input_specs if spec.kind == InputKind.USER_INPUT]
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    if sorted(names) != sorted(inputs) or len(arguments) != len(names):
        raise NotDirect(f"it takes {len(arguments)} inputs, expected {', '.join(inputs)}")
    batches = set()
    for argument, name in zip(arguments, names, strict=True):
        value = values.get(argument.name)
        if not isinstance(argument, TensorArgument) or not isinstance(value, torch.Tensor) or value.dim() == 0:
            raise NotDirect(f"input {name!r} is no tensor with rows")
        batch, *shape = value.shape
        if any(not isinstance(size, int) for size in shape) or tuple(shape) != inputs[name].shape:
            raise NotDirect(f"input {name!r} has rows of shape {shape}, expected {list(inputs[name].shape)}")
        batches.add(batch if isinstance(batch, int) else batch.node.expr)
    (batch,) = batches if len(batches) == 1 else (0,)
    allowed = program.range_constraints.get(batch)  # of a plain symbol; a multiple of one has none of its own
    if batch == most == 1 or (allowed is not None and allowed.lower <= 1 and allowed.upper >= most):
        return
    raise NotDirect(f"it computes batches of {batch} rows, expected any number from 1 to {most}")


class _Step(NamedTuple):
    """An operation: take arguments from the slots, call, and put the result into one."""

    call: Callable[..., Any]
    arguments: Callable[[list[Any]], Sequence[Any]]
    place: int


class _Slots:
    """The slots of a function's values. Constants have theirs, too, so that a step finds all its arguments there."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.of: dict[torch.fx.Node, int] = {}
        self.steps: list[_Step] = []

    def add(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def place(self, value: Any) -> int:
        """Return the slot of an argument. A list with results in it is made by a step of its own."""
        if isinstance(value, torch.fx.Node):
            return self.of[value]
        if isinstance(value, (list, tuple)) and any(isinstance(part, (torch.fx.Node, list, tuple)) for part in value):
            return self.step(_tuple if isinstance(value, tuple) else _list, value, {})
        return self.add(list(value) if isinstance(value, list) else value)

    def step(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], over: Sequence[int] = ()
    ) -> int:
        """Add a step; return the slot of its result.

        Args:
            over: slots whose values no later step needs. They are released, as by the module's own code: the result
                takes the first one's place, and the others are emptied.
        """
        places = [self.place(value) for value in (*args, *kwargs.values())]
        if kwargs:
            call = partial(_call_with, call, tuple(kwargs))
        result = over[0] if over else self.add(None)
        self.steps.append(_Step(call, _picker(places), result))
        self.steps += [_Step(_none, _picker(()), place) for place in over[1:]]
        return result


def _function(
    program: torch.export.ExportedProgram,
    inputs: Sequence[str],
    names: Sequence[str],
    tensors: Mapping[str, torch.Tensor],
) -> Callable[..., Any]:
    """Return a function that takes the inputs, by name or by position, and runs the program's operations in order."""
    slots, given = _Slots(), iter(_sources(program, names, tensors))
    places: dict[str, int] = {}
    last = {value: node for node in program.graph.nodes for value in node.all_input_nodes}  # where it is used last
    results: Callable[[list[Any]], Any] = _list
    for node in program.graph.nodes:
        if node.op == "placeholder":
            source = next(given)
            slots.of[node] = slots.add(None if isinstance(source, str) else source)
            if isinstance(source, str):
                places[source] = slots.of[node]
        elif node.op == "call_function":
            over = [value for value in node.all_input_nodes if last[value] is node and value.op == "call_function"]
            places_over = [slots.of[value] for value in over]
            slots.of[node] = slots.step(_called(node), node.args, node.kwargs, places_over)
        elif node.op == "output":
            results = _results(program, [slots.of[value] for value in node.args[0]])
        else:
            raise NotDirect(f"it has a {node.op} of {node.target}, expected operations alone")
    values, steps, ordered = slots.values, tuple(slots.steps), [places[name] for name in inputs]

    def forward(*arguments: Any, **named: Any) -> Any:
        current = values.copy()
        for place, value in zip(ordered, arguments, strict=False):
            current[place] = value
        for name, value in named.items():
            current[places[name]] = value
        for call, pick, place in steps:
            current[place] = call(*pick(current))
        return results(current)

    return forward


def _picker(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function that returns the values in these slots: `itemgetter`, in the form that returns a sequence."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return operator.itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def _none() -> None:
    return None


def _list(*values: Any) -> list[Any]:
    return list(values)


def _tuple(*values: Any) -> tuple[Any, ...]:
    return values


def _call_with(call: Callable[..., Any], names: tuple[str, ...], *values: Any) -> Any:
    """Call with the last values as keyword arguments."""
    first = len(values) - len(names)
    return call(*values[:first], **dict(zip(names, values[first:], strict=True)))


def _sources(
    program: torch.export.ExportedProgram, names: Sequence[str], tensors: Mapping[str, torch.Tensor]
) -> list[str | torch.Tensor]:
    """Return the source of each placeholder: the name of an input, or a tensor."""
    remaining = list(names)
    sources: list[str | torch.Tensor] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            sources.append(remaining.pop(0))
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target in tensors:
            sources.append(tensors[spec.target])
        elif isinstance(value := program.constants.get(spec.target or ""), torch.Tensor):
            sources.append(value)
        else:
            raise NotDirect(f"it needs {spec.target!r}, which is no parameter, buffer or tensor")
    return sources


def _called(node: torch.fx.Node) -> Callable[..., Any]:
    """Return the function to call for an operation; that of an overload is called without its Python wrapper."""
    target: Any = node.target
    if isinstance(target, _OVERLOAD):
        if _draws(node, target):  # to seed them would seed other models' draws, too
            raise NotDirect(f"it draws random numbers ({target}), so that results cannot be compared")
        function: Callable[..., Any] = getattr(target, "_op", target)
        return function
    if any(target is known for known in _OPERATORS):  # arithmetic with the number of rows, parts of a result
        return target  # type: ignore[no-any-return]
    raise NotDirect(f"it calls {target}, expected operations of torch")


def _draws(node: torch.fx.Node, target: Any) -> bool:
    """Return whether an operation draws random numbers; dropout does not in evaluation mode."""
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given: dict[str, Any] = {each.name: each.default_value for each in target._schema.arguments}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    return all(given.get(name) not in (0, False) for name in ("train", "training", "dropout", "dropout_p"))


def _results(program: torch.export.ExportedProgram, places: Sequence[int]) -> Callable[[list[Any]], Any]:
    """Return a function that returns the outputs from their slots: one, or a tuple, list or dict of them."""
    spec = program.call_spec.out_spec
    if spec is None or spec.num_leaves != len(places):
        raise NotDirect("it changes its buffers or its inputs")
    pick = _picker(places)
    if spec.is_leaf():
        return operator.itemgetter(places[0])
    if spec.num_children == spec.num_leaves:
        if spec.type in (tuple, list):
            return pick if len(places) > 1 else lambda slots: tuple(pick(slots))
        if spec.type is dict:
            keys = list(spec.context)
            return lambda slots: dict(zip(keys, pick(slots), strict=True))
    raise NotDirect(f"it returns {spec}, expected a tensor, or a tuple or dict of them")


def flat(results: Any) -> list[torch.Tensor]:
    """Return a module's outputs as a list."""
    if isinstance(results, torch.Tensor):
        return [results]
    return list(results.values() if isinstance(results, Mapping) else results)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes: NaN is the same as itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(part.contiguous().reshape(-1).view(torch.uint8) for part in (one, other)))
