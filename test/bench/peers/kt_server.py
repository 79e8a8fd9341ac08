"""An SGLang server whose KTransformers layers all read the experts of layer 0: ``kt_server.py [flags of the server]``.

So one layer of random experts stands for all, in the file only: kt-kernel repacks each layer into memory of its own. The
server starts processes that import this file again, so what it changes is at its top.
"""

import re
import sys
from pathlib import Path

# Modules beside this file are called like others' packages; the processes of the server inherit the path.
sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]

from kt_kernel.utils import loader  # noqa: E402  (after the path is set)


def _from_layer_0(load):
    def load_experts(self, base_key, *rest, **more):
        return load(self, re.sub(r"\blayers\.\d+", "layers.0", base_key), *rest, **more)

    return load_experts


for _kind in [kind for name, kind in vars(loader).items() if name.endswith("SafeTensorLoader")]:
    if "load_experts" in vars(_kind):
        _kind.load_experts = _from_layer_0(_kind.load_experts)

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
