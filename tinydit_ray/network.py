"""The net of a cell: TinyDiT, or one of the user's own, made by a function (``--model package.module:function``).

The function is called with those axes as keywords that its signature names (``def net(*, dim, attention): …``; any of
``MODEL_AXES``), and returns a module that maps (x_t (N, 3, 32, 32), t (N,)) to a velocity (N, 3, 32, 32). Its weights
must have the same names and the same start for every value of an axis that it takes, as TinyDiT's have: only then can
a cell be compared with its control, and be scored as the plain net.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tinydit_ray.config import AXES, NETWORK, CellConfig, control_of

if TYPE_CHECKING:
    from torch import Tensor, nn

# What is the net's own matter; every other axis works on any net.
MODEL_AXES = ("attention", "residual", "qkv", "gelu", "adaln", "patches", "dim", "depth", "heads")


def function_of(network: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names. Raises ValueError."""
    module, _, name = network.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        why = "a module's name has no .py" if module.endswith(".py") else error
        raise ValueError(f"model {network}: {module} cannot be imported ({why})") from None
    if not callable(found):
        raise ValueError(f"model {network}: {module} has no function {name}")
    return found


def taken(build: Callable[..., Any]) -> tuple[str, ...]:
    """The axes that the function takes. Raises ValueError for a parameter without default that is none of them."""
    parameters = inspect.signature(build).parameters.values()
    known = [p.name for p in parameters if p.name in MODEL_AXES]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for p in parameters:
        if p.name not in MODEL_AXES and p.kind in named and p.default is p.empty:
            raise ValueError(f"its parameter {p.name!r} is no axis; possible: {', '.join(MODEL_AXES)}")
    return tuple(known)


def build_network(cell: CellConfig) -> nn.Module:
    """The cell's net with the weights of its seed, on the CPU; the global random state is left as it was."""
    import torch

    if cell.network == NETWORK:
        from tinydit_ray.model import TinyDiTConfig, build_model

        return build_model(TinyDiTConfig.of(cell), cell.seed)
    build = function_of(cell.network)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cell.seed)
        net = build(**{name: getattr(cell, name) for name in taken(build)})
    if not isinstance(net, torch.nn.Module):
        raise ValueError(f"model {cell.network}: the function returned a {type(net).__name__}, no torch.nn.Module")
    return net


def plain_network(cell: CellConfig, model: Any, weights: Mapping[str, Tensor] | None = None) -> Any:
    """``model``, or other weights of it, as the control would run it, in fp32 and eager: what is scored."""
    from tinydit_ray.train.ema import plain_model

    if cell.network == NETWORK:
        return plain_model(model, weights)
    plain = build_network(control_of(cell, {"gelu": cell.gelu}))
    chosen = model.state_dict() if weights is None else weights
    plain.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in chosen.items()}, strict=True)
    return plain.to(next(model.parameters()).device)


def checkpoint_config(cell: CellConfig, model: Any) -> Any:
    """What a checkpoint says of its net: TinyDiT's own config, or the function's name and its axes."""
    if cell.network == NETWORK:
        return model.cfg
    axes = {name: getattr(cell, name) for name in taken(function_of(cell.network))}
    return SimpleNamespace(network=cell.network, **axes)


def check_networks(cells: Iterable[CellConfig]) -> None:
    """Build each of the users' nets once, small batch, before any trial. Raises ValueError in one line where it is no
    such net, or where a cell sets an axis that it does not take."""
    checked: set[str] = set()
    for cell in cells:
        if cell.network == NETWORK:
            continue
        _see_from_here()
        build = function_of(cell.network)
        try:
            known = taken(build)
        except ValueError as error:
            raise ValueError(f"model {cell.network}: {error}") from None
        for name in MODEL_AXES:
            if name not in known and getattr(cell, name) != AXES[name].default:
                takes = ", ".join(known) or "none"
                raise ValueError(
                    f"{name}: {getattr(cell, name)!r} has no effect on model {cell.network}, whose function takes"
                    f" {takes} of the net's axes"
                )
        if cell.sampler != "eager":
            raise ValueError(f"sampler: {cell.sampler!r} is of TinyDiT alone; model {cell.network} samples eager")
        if cell.compile_scope == "block":
            raise ValueError(f"compile_scope: 'block' is of TinyDiT alone; model {cell.network} is compiled whole")
        if cell.network not in checked:
            _try_out(cell)
            checked.add(cell.network)


def _see_from_here() -> None:
    """The working directory is importable here and in every process that is started from here."""
    import sys

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if here not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, here])


def _try_out(cell: CellConfig) -> None:
    import torch

    x, t = torch.zeros(2, 3, 32, 32), torch.tensor([0.2, 0.7])
    try:
        with torch.no_grad():
            out = build_network(control_of(cell))(x, t)
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = "it does not run on images (2, 3, 32, 32) and times (2,)"
        raise ValueError(f"model {cell.network}: {what}: {why}") from None
    if getattr(out, "shape", None) != x.shape:
        shape = tuple(getattr(out, "shape", ())) or type(out).__name__
        raise ValueError(f"model {cell.network}: gave {shape} for images (2, 3, 32, 32); a velocity has their shape")
