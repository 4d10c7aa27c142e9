"""ONNX: the compacted network, for batches of any size, checked and compared with torch before it is kept."""

from __future__ import annotations

import contextlib
import importlib
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
    plain = masked_copy(model, mask)
    try:
        plain = compact(plain, mask, example)
    except ValueError as error:
        warnings.warn(f"{error}; it is written as it is, with its zeros", stacklevel=3)
    first = _arguments(example)[0]
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
    args = _arguments(example)
    onnx, runtime = needed("onnx"), needed("onnxruntime")
    needed("onnxscript")
    model.eval()
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    shapes = tuple({0: batch} if isinstance(arg, Tensor) else None for arg in args)
    two = tuple(torch.cat([arg, arg]) if len(arg) == 1 else arg for arg in args)  # one example would be taken for all
    try:
        with _quiet():
            program = torch.onnx.export(
                model, two, dynamo=True, dynamic_shapes=shapes, verbose=False, **(names or {})
            )
    except Exception as error:
        lines = [line for line in str(error.__cause__ or error).splitlines() if line.strip()]
        raise ValueError(f"torch cannot write this network as ONNX: {lines[0] if lines else error!r}") from None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "net.onnx"
        with _quiet():
            program.save(str(file), external_data=False)  # type: ignore[union-attr]
        content = file.read_bytes()
    try:
        onnx.checker.check_model(onnx.load_from_string(content), full_check=True)
        running = session(runtime, content)
    except Exception as error:
        raise ValueError(f"ONNX Runtime cannot run this network: {str(error).partition(chr(10))[0]}") from None
    _compare(model, running, args)
    return content


def _arguments(example: Any) -> tuple[Tensor, ...]:
    inputs = inputs_of(example)
    if len(inputs.kwargs) > 1:
        raise ValueError("for ONNX give the example as a tuple of arguments, in the order of the network's inputs")
    args = (*inputs.args, *inputs.kwargs.values())
    if not args or not all(isinstance(arg, Tensor) and arg.dim() for arg in args):
        raise ValueError("for ONNX the example must be tensors with the examples of a batch in dimension 0")
    return tuple(arg.detach().cpu() for arg in args)


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


@torch.no_grad()
def _compare(model: nn.Module, running: Any, args: tuple[Tensor, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in _BATCHES:
        batch = tuple(_like(arg, size, generator) for arg in args)
        wanted = model(*batch)
        wanted = wanted if isinstance(wanted, tuple | list) else (wanted,)
        for theirs, ours in zip(run(running, batch), wanted, strict=True):
            difference = float((torch.from_numpy(theirs) - ours).abs().max()) if ours.numel() else 0.0
            if not difference <= TOLERANCE * max(1e-30, float(ours.abs().max())):
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


def run(running: Any, batch: tuple[Tensor, ...]) -> list[Any]:
    """The outputs of a network in ONNX Runtime."""
    names = [each.name for each in running.get_inputs()]
    outputs: list[Any] = running.run(None, {name: arg.numpy() for name, arg in zip(names, batch, strict=True)})
    return outputs


def latencies(contents: Mapping[str, bytes], example: Any, *, rounds: int = 30, batch: int = 1) -> dict[str, float]:
    """Median seconds for a batch of several networks in ONNX Runtime, taken in turn."""
    runtime = needed("onnxruntime")
    generator = torch.Generator().manual_seed(0)
    args = tuple(_like(arg, batch, generator) for arg in _arguments(example))
    running = {name: session(runtime, content) for name, content in contents.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contents}
    for turn in range(rounds + 3):
        for name, each in running.items():
            start = time.perf_counter()
            run(each, args)
            if turn >= 3:  # the first ones warm up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's own messages (it misses torchvision, which nothing here needs)."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
