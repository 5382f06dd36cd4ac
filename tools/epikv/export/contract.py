"""Checks a module against the model contract, as the daemon does at load."""

from typing import Any

import torch

from epikv.export.manifest import Manifest
from epikv.export.operators import KvCache, Module, Step, running

_OPERATORS = ("epikv::block", "epikv::attention")


def violations(module: torch.jit.ScriptModule, num_layers: int) -> list[str]:
    """What `module` breaks: its forward, the operators' calls, their order, their results' use.

    Reads the inlined graph before freezing: freezing merges equal calls of `block`, deletes
    unused ones, and so would hide a broken module.
    """
    graph: Any = module.inlined_graph  # its stubs lack findAllNodes
    found = _signature(graph)
    calls = []
    for node in graph.findAllNodes("prim::fork"):
        found.append(f"forks at {_where(node)}")
    for kind in _OPERATORS:
        nested = len(list(graph.findAllNodes(kind))) - len(list(graph.findAllNodes(kind, False)))
        if nested:
            found.append(f"{kind} is called {nested} times under a condition or in a loop")
    for node in graph.nodes():
        if node.kind() in _OPERATORS:
            layer = list(node.inputs())[-1].toIValue()
            name = f"{node.kind()}({'?' if layer is None else layer})"
            calls.append(name)
            if layer is None:
                found.append(f"{node.kind()} is called with a layer that is not constant")
            if not node.output().uses():
                found.append(f"the result of {name} is not used")
    wanted = [f"{kind}({layer})" for layer in range(num_layers) for kind in _OPERATORS]
    wanted.append(f"epikv::block({num_layers})")
    for name in sorted(set(wanted) | set(calls)):
        count = calls.count(name)
        if count != wanted.count(name):
            found.append(f"{name} is called {count} times, not {wanted.count(name)}")
    if sorted(calls) == sorted(wanted) and calls != wanted:
        found.append(f"the calls come in the order {', '.join(calls)}")
    return found


def missing_calls(module: Module, manifest: Manifest) -> list[str]:
    """What a forward of a compiled module does not call: there is no graph to read. A call that is
    not due raises RuntimeError."""
    step = Step(manifest, [KvCache.empty(manifest)], [1], torch.tensor([0]))
    with running(step):
        module(torch.tensor([0]), torch.tensor([0]), torch.tensor([0]))
    layers = range(len(manifest.layers))
    called = {f"block({layer})" for layer in range(len(step.residuals))}
    called |= {f"attention({layer})" for layer in step.attended}
    wanted = [f"{kind}({layer})" for layer in layers for kind in ("block", "attention")]
    return [
        f"epikv::{call} is not called"
        for call in [*wanted, f"block({len(layers)})"]
        if call not in called
    ]


def _signature(graph: torch.Graph) -> list[str]:
    inputs = [str(value.type()) for value in list(graph.inputs())[1:]]
    outputs = [str(value.type()) for value in graph.outputs()]
    if inputs == ["Tensor"] * 3 and outputs == ["Tensor"]:
        return []
    return [
        "forward must take (token_ids, positions, last) and return logits, all tensors;"
        f" it takes ({', '.join(inputs)}) and returns {', '.join(outputs)}"
    ]


def _where(node: torch.Node) -> str:
    return str(node.sourceRange()).strip().splitlines()[-1].strip()
