"""Read a network's file with numpy alone: python examples/read_net.py net.safetensors."""

import json
import sys
from pathlib import Path

import numpy as np


def read_net(path):
    """All tensors of a file, dense, by name (for what numpy knows: not bfloat16)."""
    data = Path(path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:start])
    about = head.pop("__metadata__")
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?"}
    ranges = {name: [start + at for at in part["data_offsets"]] for name, part in head.items()}
    raw = {name: np.frombuffer(data[a:b], kinds[head[name]["dtype"]]) for name, (a, b) in ranges.items()}
    found = {name: raw[name].reshape(head[name]["shape"]) for name in raw if ":" not in name}
    for name, layer in json.loads(about["layers"]).items():
        listed, k = layer["listed"], layer["k"]
        ones = np.flatnonzero(np.unpackbits(raw[name + ":high"]))[:listed]
        low = np.unpackbits(raw[name + ":low"])[: listed * k].reshape(listed, k) @ (1 << np.arange(k)[::-1])
        places = (ones - np.arange(listed) << k) + np.cumsum(low) + np.arange(listed)
        kept = np.full(layer["shape"], layer["inverted"])
        kept.flat[places.astype(int)] = not layer["inverted"]
        found[name] = np.zeros(layer["shape"], layer["dtype"])
        found[name][kept] = raw[name + ":kept"]
    return found | {name: found[other] for name, other in json.loads(about["tied"]).items()}


if __name__ == "__main__":
    for name, values in read_net(sys.argv[1]).items():
        print(f"{name:40} {values.dtype!s:8} {values.shape!s:24} {np.count_nonzero(values):,} not zero")
