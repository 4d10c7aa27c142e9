"""ONNX: the compacted network, for batches of any size, checked and compared with torch before it is kept."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_map

from driveprune.compact import compact
from driveprune.export._pixels import Normalised, Pixels, described
from driveprune.export._state import masked_copy
from driveprune.files import write_atomically
from driveprune.graph import inputs_of

TOLERANCE = 1e-5
"""The largest difference to torch's output, relative to its largest value, with which a file is kept."""
_BATCHES = (1, 2, 5)


def write(
    path: Path,
    model: nn.Module,
    mask: Mapping[str, Tensor],
    example: Any,
    *,
    pixels: Pixels | None = None,
    preprocess: bool = True,
) -> None:
    """Write the compacted network in evaluation mode; see `driveprune.export.export`."""
    plain = compact(masked_copy(model, mask), mask, example)  # it warns where it cannot make a network smaller
    first = next(iter(_tensors(example).values()))
    inside = pixels is not None and preprocess
    if pixels is not None:
        if first.dim() != 4 or not first.is_floating_point():
            raise ValueError(f"pixels are for networks of images (N, C, H, W), got {tuple(first.shape)}")
        plain, example = (Normalised(plain, pixels), first.byte()) if preprocess else (plain, first)
    content = to_onnx(plain, example, names=_names(plain, example) if pixels is not None else None)
    write_atomically(path, _with_metadata(content, described(first, pixels, inside)))


@torch.no_grad()
def _names(model: nn.Module, example: Tensor) -> dict[str, list[str]]:
    """Names for what a network of images takes and gives."""
    inputs = {"input_names": ["image"]}
    return inputs | ({"output_names": ["logits"]} if isinstance(model(example), Tensor) else {})


def _with_metadata(content: bytes, about: Mapping[str, str]) -> bytes:
    """The same file, which also says what it takes."""
    model = needed("onnx").load_from_string(content)
    for key, value in {"driveprune": version("driveprune"), **about}.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    model.doc_string = about["input"]
    written: bytes = model.SerializeToString()
    return written


def to_onnx(model: nn.Module, example: Any, *, names: Mapping[str, Any] | None = None) -> bytes:
    """A network as the bytes of an ONNX file; an error if ONNX Runtime does not compute what torch does.

    `names` are those of its inputs and outputs, as `input_names` and `output_names`.
    """
    given = _by_name(model, _tensors(example))
    onnx, runtime = needed("onnx"), needed("onnxruntime")
    needed("onnxscript")
    model.eval()
    try:
        with _quiet():
            program = _program(model, given, names or _names_of_outputs(model, given))
    except Exception as error:
        lines = [line for line in str(error.__cause__ or error).splitlines() if line.strip()]
        raise ValueError(f"torch cannot write this network as ONNX: {lines[0] if lines else error!r}") from None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "net.onnx"
        with _quiet():
            program.save(str(file), external_data=False)
        content = file.read_bytes()
    try:
        onnx.checker.check_model(onnx.load_from_string(content), full_check=True)
        running = session(runtime, content)
    except Exception as error:
        raise ValueError(f"ONNX Runtime cannot run this network: {str(error).partition(chr(10))[0]}") from None
    _compare(model, running, given)
    return content


def _program(model: nn.Module, given: Given, names: Mapping[str, Any]) -> Any:
    """What torch makes of a network, for batches of any size."""
    two = {name: torch.cat([x, x]) if len(x) == 1 else x for name, x in given.items()}  # one would be taken for all
    args, kwargs = _split(two)
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    shapes = tree_map(lambda leaf: {0: batch}, dict(bound))
    return torch.onnx.export(model, args, kwargs=kwargs, dynamo=True, dynamic_shapes=shapes, verbose=False, **names)


Given = Mapping[str | int, Tensor]
"""What a network is called with: by the names of its inputs, or by their places."""


def _tensors(example: Any) -> dict[str | int, Tensor]:
    """An example as a user gives it; inputs that are None are left out."""
    inputs = inputs_of(example)
    given: dict[str | int, Any] = dict(enumerate(inputs.args))
    given |= {name: x for name, x in inputs.kwargs.items() if x is not None}
    if not given or not all(isinstance(x, Tensor) and x.dim() for x in given.values()):
        raise ValueError("for ONNX the example must be tensors with the examples of a batch in dimension 0")
    return {name: x.detach().cpu() for name, x in given.items()}


def _by_name(model: nn.Module, given: Given) -> dict[str | int, Tensor]:
    """The same by the names that the network has for its inputs, in its order; as it is if there are none."""
    args, kwargs = _split(given)
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    named: dict[str | int, Tensor] = {}
    for name, value in bound.items():
        named |= value if isinstance(value, dict) else {name: value}
    return named if all(isinstance(x, Tensor) for x in named.values()) else dict(given)


def _split(given: Given) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    args = tuple(x for name, x in given.items() if isinstance(name, int))
    return args, {name: x for name, x in given.items() if isinstance(name, str)}


@torch.no_grad()
def _leaves(model: nn.Module, given: Given) -> dict[str, Tensor]:
    """The tensors that a network gives, by their places in its output; what is no tensor is left out."""
    args, kwargs = _split(given)
    found, _ = tree_flatten_with_path(model(*args, **kwargs))
    return {
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): leaf
        for path, leaf in found
        if isinstance(leaf, Tensor)
    }


def _names_of_outputs(model: nn.Module, given: Given) -> dict[str, list[str]]:
    """The names of outputs that are in a dictionary; torch finds its own for others."""
    names = list(_leaves(model, given))
    return {"output_names": names} if all(name and not name.isdigit() for name in names) else {}


def needed(name: str) -> Any:
    """A package that only exports need."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ImportError(f"{name} is needed for ONNX: pip install 'driveprune[onnx]'") from None


def session(runtime: Any, content: bytes, threads: int | None = None) -> Any:
    """A network in ONNX Runtime, on the CPU."""
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _compare(model: nn.Module, running: Any, given: Given) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in _BATCHES:
        batch = {name: _like(x, size, generator) for name, x in given.items()}
        try:
            found, known = run(running, batch), _leaves(model, batch)
        except Exception as error:
            said = next((line for line in str(error).splitlines() if line.strip()), repr(error))
            raise ValueError(
                f"for ONNX dimension 0 of all inputs must be any number of examples, and {size} cannot be: {said}"
            ) from None
        if len(found) != len(known):
            raise ValueError(
                f"ONNX Runtime gives {len(found)} outputs, and the network gives {len(known)} tensors: all that it "
                "gives must be tensors"
            )
        for theirs, wanted in zip(found, known.values(), strict=True):
            ours = wanted.double()
            difference = float((torch.from_numpy(theirs) - ours).abs().max()) if ours.numel() else 0.0
            if not difference <= TOLERANCE * max(1e-30, float(ours.abs().max()) if ours.numel() else 0.0):
                raise ValueError(
                    f"ONNX Runtime does not compute what torch does: the outputs differ by {difference:g}"
                )


def _like(arg: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A batch of the kind of an example: random numbers, random bytes, or the same integers."""
    if arg.is_floating_point():
        return torch.randn(size, *arg.shape[1:], generator=generator).to(arg.dtype)
    if arg.dtype == torch.uint8:
        return torch.randint(256, (size, *arg.shape[1:]), generator=generator).to(arg.dtype)
    return arg[:1].expand(size, *arg.shape[1:]).contiguous()


def run(running: Any, batch: Given) -> list[Any]:
    """The outputs of a network in ONNX Runtime."""
    names = [each.name for each in running.get_inputs()]
    known = batch if all(name in batch for name in names) else dict(zip(names, batch.values(), strict=True))
    outputs: list[Any] = running.run(None, {name: known[name].numpy() for name in names})
    return outputs


def latencies(contents: Mapping[str, bytes], example: Any, *, rounds: int = 30, batch: int = 1) -> dict[str, float]:
    """Median seconds for a batch of several networks in ONNX Runtime, taken in turn."""
    runtime = needed("onnxruntime")
    generator = torch.Generator().manual_seed(0)
    given = {name: _like(x, batch, generator) for name, x in _tensors(example).items()}
    running = {name: session(runtime, content) for name, content in contents.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contents}
    for turn in range(rounds + 3):
        for name, each in running.items():
            start = time.perf_counter()
            run(each, given)
            if turn >= 3:  # the first ones warm up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's own messages (it misses torchvision, which nothing here needs)."""
    level, out = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
