"""What a long run meets: signals, a dying rank, a full disk, damaged files, gradients that are not finite."""

import json
import os
import shutil
import signal
import time

import pytest
from conftest import MORE, SMALL, metrics, run_program, start_program, train

from run.signals import STOPPED
from train import main
from transfer import knn

TORCHRUN = """
import multiprocessing, os, runpy, subprocess, sys
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.run import main

def rank(words, environment):
    os.setsid()
    os.environ.update(environment)
    sys.argv = [*words[2:]]  # without python -u
    runpy.run_path(sys.argv[0], run_name="__main__")

class Fork:
    def __init__(self, args, env, **_):
        self.process = multiprocessing.get_context("fork").Process(target=rank, args=(args, env))
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    def wait(self, timeout):
        self.process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("rank", timeout)

subprocess_handler.Popen = Fork
main(sys.argv[1:])
"""


def start(data, output, *more, ranks=1):
    """train.py in the background, once it has written a first line of metrics, and what tells what it has said. Its
    ranks are children of torchrun, which starts them a second time; forks of it, as importing torch anew takes long."""
    launcher, said = (), output.parent / "said"
    if ranks > 1:
        launcher = "-c", TORCHRUN, "--nproc-per-node", ranks, "--standalone", "--max-restarts", 1
        launcher += "--monitor-interval", 0.1
    running = start_program(said, *launcher, "train.py", *SMALL, "--data", data, "--output", output, *more)
    wait_for(lambda: (output / "metrics.jsonl").exists() and (output / "metrics.jsonl").stat().st_size)
    return running, lambda: "".join((said / name).read_text() for name in ("out", "err"))


def wait_for(condition, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.02)


def ended(process):
    """Its exit code."""
    process.join(240)
    return process.exitcode


def children(process):
    return [int(x) for x in open(f"/proc/{process.pid}/task/{process.pid}/children").read().split()]


def alive(pid):
    return os.path.exists(f"/proc/{pid}") and "Z" not in open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]


def test_a_signal_saves_and_the_same_command_goes_on(undisturbed, photos, tmp_path, capsys):
    """And as long as the program is there, be it halted, no other may work in its folder."""
    running, said = start(photos, tmp_path / "run", *MORE)
    os.kill(running.pid, signal.SIGSTOP)
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, "--data", str(photos), "--output", str(tmp_path / "run")])
    assert "in use by another process" in capsys.readouterr().err
    os.kill(running.pid, signal.SIGTERM)
    os.kill(running.pid, signal.SIGCONT)
    assert ended(running) == STOPPED == 75 and "stopped on request after step" in said()
    assert not list((tmp_path / "run" / "inflight").iterdir())
    train(photos, tmp_path / "run", "--eval-data", photos, *MORE)
    assert metrics(tmp_path / "run") == metrics(undisturbed[0])
    one, other = ((output / "encoder/model.safetensors").read_bytes() for output in (undisturbed[0], tmp_path / "run"))
    assert one == other


def changed(code, data, output, *more, check):
    """train.py in a process where something is changed first."""
    code = f"import runpy, resource, signal, sys\n{code}\nrunpy.run_path('train.py', run_name='__main__')"
    return run_program("-c", code, *SMALL, "--data", data, "--output", output, *more, check=check)


def test_a_signal_after_the_last_step_is_one_line(undisturbed, photos, tmp_path):
    """All steps are done, so there is nothing to finish or to save."""
    shutil.copytree(undisturbed[0], tmp_path / "run")
    code = "from transfer import knn\nknn.compare = lambda *_, **__: signal.raise_signal(signal.SIGTERM)"
    done = changed(code, photos, tmp_path / "run", "--eval-data", photos, *MORE, check=STOPPED)
    assert "step 32 was the last" in done.stdout
    assert (
        done.stderr.startswith("train.py: interrupted; the same command goes on from") and done.stderr.count("\n") == 1
    )


def test_a_signal_ends_what_is_measured_in_the_midst_of_a_run(photos, tmp_path, monkeypatch, capsys):
    """The bank is being embedded; the queries are not any more, and the step before is saved."""
    encode = knn.encode
    monkeypatch.setattr(knn, "encode", lambda *what: signal.raise_signal(signal.SIGTERM) or encode(*what))
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, *map(str, ("--data", photos, "--eval-data", photos, "--knn-every", 1, "--output", tmp_path))])
    said = capsys.readouterr().out
    assert ended.value.code == STOPPED and "no k-NN accuracy of step 16: asked to stop" in said
    assert said.endswith("stopped on request after step 16, which is saved; the same command goes on from there\n")


def test_a_first_signal_is_told_of_and_a_second_one_ends_all_at_once(tmp_path):
    """Also within an operation that does not come back to Python."""
    code = (
        "import hashlib, torch\nfrom run.ranks import Ranks\nfrom run.signals import StopRequest\n"
        "with StopRequest(Ranks(0, 1, 1, torch.device('cpu')), lambda line: print(line, flush=True)):\n"
        "    print('ready', flush=True)\n    hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)\n"
    )
    running, said = start_program(tmp_path / "said", "-c", code), tmp_path / "said/out"
    wait_for(lambda: said.exists() and said.read_text() == "ready\n")
    running.terminate()
    wait_for(lambda: said.read_text().startswith("ready\nasked to stop: this step is finished"))
    for pause in (0.1, 1.2):  # the second comes so soon that it is the first one again, handed on
        time.sleep(pause)
        assert running.exitcode is None
        running.terminate()
    running.join(10)
    assert running.exitcode == 128 + signal.SIGTERM


def test_a_rank_dies_the_job_goes_on_from_the_checkpoint_and_stops_as_one(photos, tmp_path):
    longer = "--epochs", 6  # not over before it is asked to stop
    running, said = start(photos, tmp_path / "run", *longer, ranks=2)
    wait_for(lambda: list((tmp_path / "run" / "checkpoints").glob("*.pt")))
    first = children(running)
    os.kill(first[-1], signal.SIGKILL)
    wait_for(lambda: said().count("patches per view") == 2)
    assert "; steps 1 to 96\n" not in said().rpartition("patches per view")[2]
    # The other rank says so, in a line, unless torchrun ends it first.
    assert "Traceback" not in said(), said()
    workers = [*first, *children(running)]
    running.terminate()
    assert ended(running) and len(set(workers)) == 4
    wait_for(lambda: not any(map(alive, workers)))
    assert "stopped on request after step" in said()
    steps = [int(path.stem[5:]) for path in (tmp_path / "run" / "checkpoints").iterdir()]
    done = train(photos, tmp_path / "run", *longer)  # with another number of ranks
    assert f"steps {max(steps) + 1} to 96" in done.stdout
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, *range(3, 97, 3)]


@pytest.mark.gpu
def test_a_run_on_a_gpu_goes_on_in_another_process_with_the_same_bits(photos, tmp_path):
    """Also where positions are learned; both processes take the code that the first has compiled."""
    pytest.importorskip("tyro")
    pytest.importorskip("nvidia.dali")
    how = *MORE, "--device", "cuda", "--precision", "bfloat16", "--position-embedding", "learned", "--max-steps", 16
    train(photos, tmp_path / "run", *how, "--checkpoint-every", 6)
    whole = metrics(tmp_path / "run"), (tmp_path / "run" / "encoder/model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "run" / "encoder")
    for path in sorted((tmp_path / "run" / "checkpoints").iterdir())[1:]:
        path.unlink()
    assert "steps 7 to 16" in train(photos, tmp_path / "run", *how, "--checkpoint-every", 6).stdout
    assert whole[0] == metrics(tmp_path / "run")  # by themselves: the first step that differs is then named
    assert whole[1] == (tmp_path / "run" / "encoder/model.safetensors").read_bytes()


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(undisturbed, photos, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(undisturbed[0], output)
    shutil.rmtree(output / "encoder")
    newest = max((output / "checkpoints").iterdir())
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    done = train(photos, output, "--eval-data", photos, *MORE)
    assert f"{newest} is damaged (checksum of" in done.stdout and "steps 31 to 32" in done.stdout
    assert metrics(output) == metrics(undisturbed[0])
    assert (output / "encoder/model.safetensors").read_bytes() == (
        undisturbed[0] / "encoder/model.safetensors"
    ).read_bytes()


def test_a_full_disk_is_one_line_and_harms_nothing(photos, tmp_path):
    """Files may grow to 200 kB only, as if the disk were full; a checkpoint needs more."""
    output = tmp_path / "run"
    train(photos, output, "--max-steps", "5")
    before = {path: path.read_bytes() for path in (output / "checkpoints").iterdir()}
    done = changed("resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))", photos, output, check=1)
    said = [line for line in done.stderr.splitlines() if line.startswith("train.py:")]
    assert len(said) == 1 and "File too large" in said[0] and "intact" in said[0], done.stderr
    assert "Traceback" not in done.stderr
    assert before == {path: path.read_bytes() for path in (output / "checkpoints").iterdir()}


def test_gradients_that_are_never_finite_stop_the_run(photos, tmp_path, capsys):
    arguments = [*SMALL, "--data", str(photos), "--output", str(tmp_path), "--lr", "1e38", "--log-every", "8"]
    with pytest.raises(RuntimeError, match=r"steps in a row until step \d+ had no finite gradient; .*skipped\.json"):
        main(arguments)
    dumped = json.loads((tmp_path / "skipped.json").read_text())
    assert dumped["seed"] == 0 and all(len(batch["images"]) == 12 for batch in dumped["batches"])
    assert all((photos / path).exists() for batch in dumped["batches"] for path in batch["images"])
    assert any(line["skipped"] for line in metrics(tmp_path))
