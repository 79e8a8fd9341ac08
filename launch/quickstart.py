"""The quick start: environment, two checkpoints of one model, three servers, one table.

Stock BF16, hybrid BF16 and hybrid 4-bit answer the same prompts with the same flags; the exit status is 0 only if
all three give the expected tokens wherever the margin leaves no doubt. One server runs at a time: to
start the next one ahead saves nothing on two cores, where it slows the threads of the one that still answers.
"""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from launch import client, environment, machine, processes, progress, server
from launch.report import Prompt, Run, agrees, differences, results, spent

ROOT = environment.ROOT
OUT = ROOT / "build" / "quickstart"
EXPECTED = ROOT / "launch" / "models" / "recite-moe" / "expected.json"
AT_ONCE = 8
REPEATS = 5
PROMPT = 2048
MANY = 16
PLAN = (("Stock BF16", "bf16", False), ("Hybrid BF16", "bf16", True), ("Hybrid 4-bit", "mxfp4", True))


@dataclass
class Session:
    venv: Path
    ports: list[int]
    prompts: list[Prompt]
    device: str = "cpu"
    steps: dict[str, float] = field(default_factory=dict)


def load_prompts() -> list[Prompt]:
    entries = json.loads(EXPECTED.read_text())
    return [Prompt(each["prompt"], tuple(each["output_ids"]), each["min_margin"]) for each in entries]


def chosen_ports() -> list[int]:
    """Two in turn, so that no server waits for the one before to free its own: free ones, or ``QUICKSTART_PORT`` and the next."""
    text = os.environ.get("QUICKSTART_PORT", "")
    if not text:
        return machine.free_ports(2)
    if not text.isdecimal() or not 1024 <= int(text) <= 65534:
        raise progress.StepFailed(f"QUICKSTART_PORT={text} is not a port: give a number from 1024 to 65534, or unset it")
    return [int(text), int(text) + 1]


def write_models(session: Session) -> None:
    source = [environment.ROOT / "launch" / "recite.py", *EXPECTED.parent.iterdir()]
    newest = max(file.stat().st_mtime for file in source)
    for form in dict.fromkeys(form for _, form, _ in PLAN):
        target = OUT / f"recite-{form}"
        if target.exists() and target.stat().st_mtime > newest:
            continue
        command = [str(environment.python(session.venv)), "-m", "launch.recite", form, str(target)]
        progress.run(
            f"Writing the recite model as {form}",
            command,
            log=OUT / f"recite-{form}.log",
            environ=dict(os.environ),
            folder=ROOT,
        )


def start_server(session: Session, index: int) -> server.Server:
    label, form, hybrid = PLAN[index]
    port = session.ports[index % 2]
    return server.start(
        label=label,
        venv=session.venv,
        model=OUT / f"recite-{form}",
        port=port,
        hybrid=hybrid,
        device=session.device,
        logs=OUT,
    )


def measure_prefill(port: int, ids: list[int]) -> tuple[float, float]:
    """Tokens per second of one long prompt and of as many tokens in short prompts.

    The best of several, for both sides: whatever else the machine does only ever takes speed away.
    """
    one, many = [], []
    for repeat in range(REPEATS + 1):  # the first warms up
        text = ids[repeat : repeat + PROMPT]
        short = [text[i :: MANY] for i in range(MANY)]
        one.append(PROMPT / client.prefill(port, [text]))
        many.append(PROMPT / client.prefill(port, short))
    return max(one[1:]), max(many[1:])


def shown(line: progress.Line, head: str, text: str) -> None:
    line.show(f"{head} …{text}".replace("\n", " "))


def measure_decode(port: int, prompts: list[Prompt]) -> tuple[list[client.Answer], float]:
    """One prompt after the other, nothing else running: the answers, and decoded tokens per second."""
    line = progress.Line("Timed prompts, one at a time")
    answers = []
    for index, prompt in enumerate(prompts):
        show = partial(shown, line, f"{index + 1} of {len(prompts)}: {prompt.text}")
        answers.append(client.generate(port, len(prompt.ids), prompt=prompt.text, seen=show))
    line.done()
    return answers, sum(each.decoded for each in answers) / sum(each.decode_s for each in answers)


def answer_rest(port: int, prompts: list[Prompt]) -> list[client.Answer]:
    line = progress.Line(f"The other prompts, {AT_ONCE} at a time")
    answers = []
    tokens = len(prompts[0].ids)
    for answer in client.generate_all(port, [prompt.text for prompt in prompts], tokens, AT_ONCE):
        answers.append(answer)
        line.show(f"{len(answers)} of {len(prompts)}")
    line.done()
    return answers


def use(session: Session, running: server.Server) -> Run:
    """Waits for a server, measures it, asks the rest, and ends it."""
    running.wait()
    session.steps[f"start of {running.label}"] = running.ready_s
    run, begin = Run(label=running.label, start_s=running.ready_s), time.monotonic()
    sure = [prompt for prompt in session.prompts if prompt.sure]
    rest = [prompt for prompt in session.prompts if not prompt.sure]
    client.generate(running.port, 8, prompt=sure[0].text)
    timed, run.decode = measure_decode(running.port, sure)
    stream = [token for prompt in session.prompts for token in prompt.ids]
    run.prefill_one, run.prefill_many = measure_prefill(running.port, stream * 2)
    others = answer_rest(running.port, rest)
    by_text = {prompt.text: answer.ids for prompt, answer in zip(sure + rest, timed + others, strict=True)}
    run.ids = [by_text[prompt.text] for prompt in session.prompts]
    run.prompts_s = time.monotonic() - begin
    session.steps[f"prompts of {running.label}"] = run.prompts_s
    running.stop()
    return run


def show(runs: list[Run], session: Session, total: float) -> bool:
    progress.say("\n" + results(runs, session.prompts))
    progress.say("\n" + spent(session.steps, total) + "\n")
    wrong = [line for run in runs for line in differences(run, session.prompts)]
    for line in wrong:
        progress.say(line)
    good = all(agrees(run, session.prompts) for run in runs)
    progress.say("All outputs agree." if good else "Outputs differ: see the lines above.")
    return good


def quickstart() -> bool:
    begin = time.monotonic()
    progress.say("SGLang with its experts on our CPU kernels: the quick start")
    ports = chosen_ports()
    venv, reused = environment.ensure([], ports)
    session = Session(venv=venv, ports=ports, prompts=load_prompts())
    progress.say(f"  Environment: {venv}{' (nothing changed, reused)' if reused else ''}")
    if machine.look(environment=venv).gpu:
        session.device = "cuda"
        progress.say("  A GPU is here: everything but the hybrid servers' experts runs on it")
    session.steps["environment and build"] = time.monotonic() - begin
    mark = time.monotonic()
    write_models(session)
    session.steps["checkpoints"] = time.monotonic() - mark
    runs = [use(session, start_server(session, index)) for index in range(len(PLAN))]
    return show(runs, session, time.monotonic() - begin)


def main() -> int:
    processes.own_descendants()
    try:
        return 0 if quickstart() else 1
    except (progress.StepFailed, client.RequestFailed) as failure:
        sys.stderr.write(f"\n{failure}\n")
        return 1
    except processes.Stopped as stopped:
        sys.stderr.write(f"\nStopped by {stopped}; every process was ended.\n")
        return stopped.status
    finally:
        processes.end_all()


if __name__ == "__main__":
    sys.exit(main())
