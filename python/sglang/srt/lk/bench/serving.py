"""How fast would a model of this shape be here? A server with random weights, timed from outside.

The server is the real one, with ``--load-format dummy``: experts get valid random codes in seconds, so nothing has to be
downloaded. Routing is what random hidden states make of it: close to uniform in some models, while in others the tokens of a
batch mostly meet the same experts. Every figure is the median of several requests; a decode step is what a longer answer
takes more than a shorter one, so that prefill and network drop out.

A new model is a ``config.json`` in ``models/``; a new way to write experts an entry of ``EXPERTS``.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang.srt.lk import checkpoint
from sglang.srt.lk.config import SWITCH
from sglang.srt.lk.term import table

MODELS = Path(__file__).with_name("models")
PATIENCE_S = 1800  # for a start; most of it is upstream's own compiling on the first one
VOCABULARY = 10  # ids below it are not used: many models give them a meaning
SHORT = 8  # tokens of the answer that is taken off
OURS = (sys.executable, "-c", "from sglang.cli.main import main; main()", "serve")
_FOUR_BITS = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
# The compressed-tensors conventions, for models whose config.json does not say how their experts are written.
EXPERTS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "mxfp4": {"format": "mxfp4-pack-quantized", "weights": {**_FOUR_BITS, "strategy": "group", "group_size": 32}},
    "nvfp4": {"format": "nvfp4-pack-quantized", "weights": {**_FOUR_BITS, "strategy": "tensor_group", "group_size": 16}},
}
# All but the routed experts; a dense layer's matrices are called like theirs.
IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*linear_attn.*", "re:.*mlp[.](gate|(gate|up|gate_up|down)_proj)$", "re:.*shared_expert.*"]


class ServerFailed(RuntimeError):
    """The server did not come up or did not answer; the message ends with its log."""


@dataclass(frozen=True)
class Row:
    """One measured case: milliseconds of a decode step or of a prefill, ``spread`` its middle half ÷ median."""

    what: str
    model: str
    experts: str
    batch: int
    prompt: int
    ms: float
    tokens_per_s: float
    spread: float

    as_dict = asdict


def known() -> list[str]:
    return sorted(file.stem for file in MODELS.glob("*.json"))


def config_of(name: str, *, experts: str | None, layers: int | None) -> dict[str, Any]:
    """The ``config.json`` of a shipped name or a file, with the experts and the number of layers asked for."""
    file = MODELS / f"{name}.json"
    if not file.is_file():
        file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not file.is_file():
        raise ValueError(f"--model-config {name}: neither a file nor one of {', '.join(known())}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--model-config {file}: it is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"--model-config {file}: it is not a JSON object")
    text = checkpoint.text_model(config)
    for key, least in (("vocab_size", VOCABULARY + 1), ("num_hidden_layers", 1)):
        if type(text.get(key)) is not int or text[key] < least:
            raise ValueError(f"--model-config {file}: {key} is {_short(text.get(key))}; a whole number from {least} is needed")
    if layers is not None:
        if not 1 <= layers <= text["num_hidden_layers"]:
            raise ValueError(f"--layers {layers}: the model has {text['num_hidden_layers']}")
        text["num_hidden_layers"] = layers
        text |= {key: text[key][:layers] for key in ("layer_types", "compress_ratios") if isinstance(text.get(key), list)}
    if experts is not None:
        if "quantization_config" in config or "quantization_config" in text:
            raise ValueError(f"--experts {experts}: {name} says itself how its experts are written")
        if (way := EXPERTS[experts]) is not None:
            group = {"targets": ["Linear"], "input_activations": None, "output_activations": None, **way}
            config["quantization_config"] = {
                "quant_method": "compressed-tensors", "format": way["format"], "quantization_status": "compressed",
                "config_groups": {"group_0": group}, "ignore": IGNORED,
            }  # fmt: skip
    return config


def _short(value: object) -> str:
    said = json.dumps(value)
    return said if len(said) <= 60 else said[:57] + "..."


class Server:
    """A server of random weights on a free port, and its log. ``program``: what starts it, for another SGLang."""

    def __init__(self, config: dict[str, Any], flags: list[str], environ: Mapping[str, str], program: Sequence[str] = OURS):
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "config.json").write_text(json.dumps(config))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = folder / "server.log"
        command = [*program, "--model-path", str(folder)]
        command += ["--load-format", "dummy", "--skip-tokenizer-init", "--skip-server-warmup", "--disable-radix-cache"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *flags]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={SWITCH: "1", **environ}, start_new_session=True, preexec_fn=_die_with_parent
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
            self.go_on()  # a stopped one does not hear it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()

    def stop(self) -> None:
        """Takes the processors from all its processes, until ``go_on``."""
        os.killpg(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def ready(self) -> float:
        """Seconds until it answered."""
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE_S and self._process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):  # it does not listen yet
                if self._ask("GET", "/health")[0] == 200:
                    return time.monotonic() - began
            time.sleep(0.5)
        raise ServerFailed(f"the server did not come up; its log ends:\n{self.tail()}")

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """How long one batch of greedy answers of so many tokens takes."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        began = time.perf_counter()
        try:
            status, data = self._ask("POST", "/generate", {"input_ids": prompts, "sampling_params": sampling})
        except (OSError, http.client.HTTPException) as error:
            raise ServerFailed(f"the server did not answer ({error!r}); its log ends:\n{self.tail()}") from error
        took = time.perf_counter() - began
        if status != 200 or _lengths(data) != [tokens] * len(prompts):
            raise ServerFailed(f"the server answered with status {status}: {data[:300]!r}; its log ends:\n{self.tail()}")
        return took

    def tail(self, size: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-size:]

    def says(self) -> list[str]:
        """Its lines about hybrid MoE: the table of roles, and the telemetry."""
        found, ours = [], False
        for line in self.log.read_text(errors="replace").splitlines():
            ours = "Hybrid MoE" in line or (ours and line.startswith("  "))
            found += [line] if ours else []
        return found

    def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _lengths(data: bytes) -> list[int] | None:
    """Tokens of each answer; None where these are no answers."""
    try:
        return [len(answer["output_ids"]) for answer in json.loads(data)]
    except (ValueError, TypeError, KeyError):
        return None


def decode_step(server: Server, *, batch: int, prompt: int, tokens: int, vocabulary: int, seed: int) -> float:
    """Seconds of one decode step, of so many."""
    prompts = random_prompts(batch, prompt, vocabulary, seed=seed)
    short, long = server.seconds(prompts, SHORT), server.seconds(prompts, SHORT + tokens)
    return (long - short) / tokens


def prefill_once(server: Server, *, batch: int, prompt: int, vocabulary: int, seed: int) -> float:
    """Seconds until the first token."""
    return server.seconds(random_prompts(batch, prompt, vocabulary, seed=seed), 1)


def several(once: Callable[..., float], server: Server, *, repeats: int, **rest: int) -> list[float]:
    """One of the two above, several times. The first pays for what upstream compiles and allocates when it first meets a size."""
    return [once(server, seed=repeat, **rest) for repeat in range(repeats + 1)][1:]


def random_prompts(batch: int, length: int, vocabulary: int, *, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(VOCABULARY, min(vocabulary, 30000)) for _ in range(length)] for _ in range(batch)]


def run(arguments: Any, environ: Mapping[str, str]) -> Iterator[Row | str]:
    """Rows as they are measured, and lines for the reader between them."""
    config = config_of(arguments.model_config, experts=arguments.experts, layers=arguments.layers)
    name, experts = Path(arguments.model_config).stem, arguments.experts or "as its config says"
    with Server(config, arguments.flags, environ) as server:
        yield f"ready after {server.ready():.0f} s"
        yield from server.says()
        for batch in arguments.batch or [1]:
            rest = dict(batch=batch, prompt=arguments.prompt, repeats=arguments.repeats, vocabulary=checkpoint.text_model(config)["vocab_size"])
            if arguments.what == "decode":
                times, work = several(decode_step, server, tokens=arguments.tokens, **rest), batch
            else:
                times, work = several(prefill_once, server, **rest), batch * arguments.prompt
            yield row(arguments.what, name, experts, batch=batch, prompt=arguments.prompt, times=times, work=work)
        yield from [line for line in server.says() if "[decode]" in line][-3:]


def row(what: str, model: str, experts: str, *, batch: int, prompt: int, times: list[float], work: int) -> Row:
    """``work``: the tokens that one of the ``times`` made or read."""
    low, middle, high = statistics.quantiles(times, n=4)
    return Row(what, model, experts, batch, prompt, middle * 1e3, work / middle, (high - low) / middle)


def lines(rows: list[Row]) -> list[str]:
    head = ["", "model", "experts", "batch", "prompt", "ms", "tokens/s", "spread"]
    cells = [
        [row.what, row.model, row.experts, str(row.batch), str(row.prompt), f"{row.ms:.2f}", f"{row.tokens_per_s:.1f}", f"{row.spread:.1%}"]
        for row in rows
    ]
    return table([head, *cells], "<<<>>>>>")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
