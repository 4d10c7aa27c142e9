"""Engines that run dense networks: what a sparse one has to beat. Each with a given number of threads."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from driveprune.export.onnx import to_onnx

Job = Callable[[], object]
TOLERANCE = 1e-3
"""Outputs of two engines may differ by so much of the largest one."""
NEEDED = ("openvino", "onnx", "onnxscript", "onnxruntime")


def check_installed() -> None:
    """A missing engine fails at once: the best of those that happen to be there proves nothing."""
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise SystemExit(
                f"{name} is missing ({error}): pip install -c constraints.txt -e '.[onnx,bench]'"
            ) from None


def eager(net: nn.Module, x: Tensor) -> Job:
    """Torch as it is, the channels last."""
    return in_inference(net.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last))


def in_inference(net: nn.Module, x: Tensor) -> Job:
    def run() -> Tensor:
        with torch.inference_mode():
            found: Tensor = net(x)
            return found

    return run


def compiled(net: nn.Module, x: Tensor) -> Job:
    """torch.compile, for this batch alone."""
    torch._dynamo.reset()  # otherwise the versions for other threads and batches stay
    made = torch.compile(net.to(memory_format=torch.channels_last), dynamic=False)
    return in_inference(made, x.contiguous(memory_format=torch.channels_last))


def onnx_runtime(content: bytes, x: Tensor, threads: int) -> Job:
    """ONNX Runtime; its threads do not spin on when it has finished."""
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    given = {session.get_inputs()[0].name: x.numpy()}
    return lambda: torch.from_numpy(session.run(None, given)[0])


def openvino(content: bytes, x: Tensor, threads: int) -> Job:
    """OpenVINO in float32, made for the shape of the batch."""
    core = importlib.import_module("openvino").Core()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "net.onnx"
        file.write_bytes(content)
        network = core.read_model(file)
        network.reshape(list(x.shape))
        settings = {
            "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": str(threads),
        }  # fmt: skip
        request = core.compile_model(network, "CPU", settings).create_infer_request()
    given = x.numpy()
    return lambda: torch.from_numpy(request.infer([given], share_inputs=True)[0].copy())


def engines(net: nn.Module, content: bytes, x: Tensor, threads: int) -> dict[str, Job]:
    """All engines by name, for a batch; their outputs are compared."""
    jobs = {
        "torch eager": eager(net, x),
        "torch.compile": compiled(net, x),
        "ONNX Runtime": onnx_runtime(content, x, threads),
        "OpenVINO": openvino(content, x, threads),
    }
    wanted = jobs["torch eager"]()
    for name, job in jobs.items():
        check_same(name, job(), wanted)
    return jobs


def check_same(name: str, found: object, wanted: object) -> None:
    """An engine that computes something else is not compared."""
    assert isinstance(found, Tensor)
    assert isinstance(wanted, Tensor)
    difference = float((found - wanted).abs().max() / wanted.abs().max())
    if not difference <= TOLERANCE:
        raise SystemExit(f"{name} does not compute what torch does: the outputs differ by {difference:g}")


def onnx_of(net: nn.Module, example: Tensor) -> bytes:
    """A network, dense with its zeros, as ONNX."""
    return to_onnx(net.eval(), example)
