# SPDX-License-Identifier: Apache-2.0
"""mlp_test.py CASE BACKEND COMMAND...: checks one promise of examples/mlp; COMMAND starts it."""

import csv
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

SKIPPED = 4
LAST_LINE = re.compile(r"test accuracy (\d+\.\d) %, weights ([0-9a-f]{16})")
DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/mlp/data/digits.csv")


class Mlp:
    """The program on one backend."""

    def __init__(self, backend, command):
        self.backend = backend
        self.command = command

    def run(self, *arguments):
        command = [*self.command, "--backend", self.backend, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == SKIPPED:
            print(done.stdout.strip())
            sys.exit(SKIPPED)
        return done

    def train(self, *arguments):
        """Trains; gives the lines of standard output, the accuracy and the hash."""
        done = self.run(*arguments)
        assert done.returncode == 0, f"{arguments}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        lines = done.stdout.splitlines()
        match = LAST_LINE.fullmatch(lines[-1])
        assert match, f"{arguments}: last line {lines[-1]!r}"
        return lines, float(match[1]), match[2]

    def hash(self, *arguments):
        return self.train(*arguments)[2]

    def gpus(self):
        """How many ranks there can be."""
        if self.backend == "host":
            return 8
        match = re.search(r"there are only (\d+) GPUs", self.run("--ranks", "1000", "--batch", "1000").stderr)
        assert match, "the number of GPUs is not told"
        return int(match[1])

    def refuses(self, *arguments, saying):
        done = self.run(*arguments)
        assert done.returncode == 2, f"{arguments}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.stdout == "", f"{arguments}: standard output {done.stdout!r}"
        lines = done.stderr.splitlines()
        assert len(lines) == 1 and saying in lines[0], f"{arguments}: {done.stderr!r} lacks {saying!r}"


def all_equal(hashes):
    assert len(set(hashes.values())) == 1, "\n".join(f"{value} {key}" for key, value in hashes.items())


def bad_input(mlp):
    for option, value in [
        ("--backend", "tpu"), ("--ranks", "0"), ("--ranks", "two"), ("--ranks", "-1"), ("--layers", "64"), ("--layers", "32,10"),
        ("--layers", "64,0,10"), ("--layers", "64,,10"), ("--layers", ""), ("--epochs", "0"), ("--epochs", "1.5"), ("--batch", "0"),
        ("--batch", "99999999999999999999"), ("--micro-batches", "0"), ("--optimizer", "lamb"), ("--lr", "-1"), ("--lr", "nan"),
        ("--lr", "0.1x"), ("--beta2", "1"), ("--schedule", "step"), ("--warmup", "-1"), ("--clip", "0"), ("--clip", "nan"),
        ("--precision", "fp8"), ("--bucket-bytes", "0"), ("--sharding", "diagonal"), ("--reduction", "fast"), ("--seed", "-1"),
        ("--zero", "2"), ("--zero", ""), ("--processes", "0"), ("--processes", "2.5"), ("--deadline", "-1"), ("--deadline", "soon"),
    ]:
        mlp.refuses(option, value, saying=option)
    mlp.refuses("--rnaks", "4", saying="unknown option '--rnaks'")
    mlp.refuses("4", saying="unknown option '4'")
    mlp.refuses("--ranks", saying="--ranks needs a value")
    mlp.refuses("--nesterov=1", saying="--nesterov takes no value")
    mlp.refuses("--optimizer", "adam", "--momentum", "0.9", saying="--momentum is a setting of --optimizer sgd")
    mlp.refuses("--optimizer", "sgd", "--beta1", "0.9", saying="--beta1 is a setting of --optimizer adam and adamw")
    mlp.refuses("--optimizer", "sgd", "--nesterov", "--dampening", "0.1", saying="nesterov")
    mlp.refuses("--ranks", "65", saying="too few samples for 65 ranks")
    mlp.refuses("--ranks", "8", "--micro-batches", "16", saying="too few samples for 8 ranks with 16 micro-batches")
    mlp.refuses("--batch", "1438", saying="only 1437 training samples")
    mlp.refuses("--reduction", "native", saying="native")
    mlp.refuses("--processes", "2", saying="--backend host: ranks are threads there, not 2 processes")
    mlp.refuses("--csv", "/nowhere/at/all.csv", saying="cannot write '/nowhere/at/all.csv'")
    mlp.refuses("--data", "/nowhere/digits.csv", saying="cannot read the data file '/nowhere/digits.csv'")
    mlp.refuses("--data", os.path.dirname(DATA), saying="data")
    damaged_data(mlp)


def damaged_data(mlp):
    with open(DATA, encoding="ascii") as file:
        rows = file.read().splitlines()
    assert len(rows) == 1797
    for changed, saying in [
        ([], "0 rows instead of 1797"),
        (rows[:-1], "1796 rows instead of 1797"),
        (rows + rows[:1], "1798 rows instead of 1797"),
        (rows[:9] + [rows[9][:-8]] + rows[10:], ":10: "),
        (rows[:9] + [rows[9] + ",1"] + rows[10:], ":10: a row has 65 values"),
        (rows[:9] + ["17" + rows[9][1:]] + rows[10:], ":10: value 1 of 65 is not a number from 0 to 16"),
        (rows[:9] + ["x" + rows[9][1:]] + rows[10:], ":10: value 1 of 65"),
        (rows[:9] + [""] + rows[10:], ":10: value 1 of 65"),
        (["1" + rows[0][1:]] + rows[1:], "not those published"),
        (rows[1:2] + rows[:1] + rows[2:], "not those published"),
    ]:
        with tempfile.NamedTemporaryFile("w", suffix=".csv", encoding="ascii") as file:
            file.write("".join(row + "\n" for row in changed))
            file.flush()
            mlp.refuses("--data", file.name, saying=saying)


def gpus(mlp):
    number = mlp.gpus()
    mlp.refuses("--ranks", str(number + 1), "--batch", "1000", saying=f"there are only {number} GPUs")
    mlp.refuses("--optimizer", "sgd", "--nesterov", "--dampening", "0.1", saying="nesterov")
    for chosen in ([], ["--backend", "cuda"]):  # cuda is the default where a GPU answers
        done = subprocess.run([*mlp.command, "--epochs", "1", *chosen], capture_output=True, text=True, check=True)
        assert "device memory in use" in done.stdout, done.stdout


def accuracy(mlp):
    for precision in ("fp32", "bf16", "bf16-fp32-grads"):
        reached = [mlp.train("--precision", precision, "--seed", str(seed))[1] for seed in (1, 2, 3)]
        print(precision, reached)
        assert sum(reached) / 3 >= 97.0, f"{precision}: {reached}"


def sharding(mlp):
    ranks = str(min(4, mlp.gpus()))
    combinations = [("adamw", "fp32"), ("sgd", "bf16"), ("adam", "bf16-fp32-grads")]
    shardings = {
        "--zero 0": ("1024",), "--sharding flat": ("1", "5000", "1000000"), "--sharding per-parameter": ("1", "5000", "1000000"),
    }
    for optimizer, precision in combinations:
        hashes = {}
        for chosen, sizes in shardings.items():
            for size in sizes:
                arguments = ["--optimizer", optimizer, "--precision", precision, "--reduction", "ordered", "--ranks", ranks,
                             "--layers", "64,37,21,10", "--epochs", "1", "--clip", "0.7", *chosen.split(), "--bucket-bytes", size]
                if mlp.backend == "cuda":
                    arguments += ["--batch", "240"]
                hashes[" ".join(arguments)] = mlp.hash(*arguments)
        all_equal(hashes)
    if mlp.backend == "host":
        all_equal({chosen: mlp.hash("--epochs", "2", *chosen.split()) for chosen in ("--zero 0", "--zero 1")})


def micro_batches(mlp):
    gpus = mlp.gpus()
    common = ["--epochs", "1", "--batch", "50" if mlp.backend == "host" else "240", "--reduction", "ordered", "--clip", "0.7"]
    for ranks in (1, 2, 4):
        if 2 * ranks > gpus:
            print(f"{ranks} ranks with two micro-batches: not compared, there are only {gpus} GPUs")
            continue
        for optimizer in ("adamw", "sgd"):
            all_equal({
                f"{r} ranks with {m}": mlp.hash(*common, "--optimizer", optimizer, "--ranks", str(r), "--micro-batches", str(m))
                for r, m in ((ranks, 2), (2 * ranks, 1))
            })


def csv_rows(mlp):
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, "steps.csv")
        arguments = ["--epochs", "2", "--warmup", "4", "--schedule", "linear", "--lr", "0.01"]
        plain = mlp.hash(*arguments)
        assert mlp.hash(*arguments, "--csv", name) == plain, "the table changes the training"
        with open(name, encoding="ascii") as file:
            rows = list(csv.DictReader(file))
    steps = 2 * (1437 // 64)
    assert list(rows[0]) == ["iteration", "loss", "lr", "norm"], rows[0]
    assert [int(row["iteration"]) for row in rows] == list(range(1, steps + 1))
    for at, row in enumerate(rows):
        factor = (at + 1) / 4 if at < 4 else 1 - (at - 4) / (steps - 4)
        assert abs(float(row["lr"]) - 0.01 * factor) < 1e-8, (at, row)
        assert float(row["norm"]) > 0, row
    assert 2.0 < float(rows[0]["loss"]) < 3.0 and float(rows[-1]["loss"]) < 1.0, (rows[0], rows[-1])


class Folder(tempfile.TemporaryDirectory):
    """A folder of checkpoints, and a table beside it."""

    def __enter__(self):
        folder = super().__enter__()
        self.csv = os.path.join(folder, "steps.csv")
        self.path = os.path.join(folder, "checkpoints")
        self.saving = ["--checkpoint-dir", self.path]
        self.resuming = [*self.saving, "--resume"]
        return self

    def labels(self):
        """Sequence and iteration of what is complete, oldest first."""
        names = [re.fullmatch(r"generation-(\d+)-iteration-(\d+)", name) for name in os.listdir(self.path)]
        return sorted((int(name[1]), int(name[2])) for name in names if name)

    def file(self, sequence, iteration, name="optimizer_pp-0-of-1_dp-0-of-2.safetensors"):
        return os.path.join(self.path, f"generation-{sequence}-iteration-{iteration}", name)

    def rows(self):
        with open(self.csv, encoding="ascii") as file:
            return list(csv.DictReader(file))


# Five steps an epoch, ten in all.
SHORT = ["--epochs", "2", "--batch", "240", "--reduction", "ordered", "--warmup", "3", "--clip", "2"]


def resume(mlp):
    """Ten steps, against six and then the other four: each batch once, the same losses, the same weights."""
    ranks = ["--ranks", str(min(4, mlp.gpus()))]
    kinds = [["--optimizer", optimizer, "--precision", precision] for optimizer, precision in
             (("adamw", "fp32"), ("sgd", "bf16"), ("adam", "bf16-fp32-grads"))]
    for kind in kinds if mlp.backend == "host" else kinds[:2]:
        arguments = [*SHORT, *ranks, *kind]
        with Folder() as parted, Folder() as whole:
            expected = mlp.hash(*arguments, "--csv", whole.csv)
            first = mlp.run(*arguments, *parted.saving, "--csv", parted.csv, "--save-every", "2", "--stop-after", "6")
            assert first.returncode == 0 and LAST_LINE.fullmatch(first.stdout.splitlines()[-1]), first
            saved = re.findall(r"mlp: saved (generation-\S+) \(\d+\.\d\d MiB on this rank\)\n", first.stderr)
            assert saved == [f"generation-{n}-iteration-{2 * n}" for n in (1, 2, 3)], first.stderr
            assert parted.labels() == [(2, 4), (3, 6)], parted.labels()
            assert [row["iteration"] for row in parted.rows()] == [str(n) for n in range(1, 7)]
            rest = mlp.run(*arguments, *parted.resuming, "--csv", parted.csv)
            assert rest.returncode == 0 and "mlp: resumed generation-3-iteration-6, saved by" in rest.stderr, rest
            assert LAST_LINE.fullmatch(rest.stdout.splitlines()[-1])[2] == expected, rest
            assert parted.rows() == whole.rows(), (parted.rows(), whole.rows())
            assert parted.labels() == [(3, 6), (4, 10)], parted.labels()
            # What was done behind the checkpoint is done again, and stands once in the table.
            shutil.rmtree(os.path.dirname(parted.file(4, 10)))
            assert mlp.hash(*arguments, *parted.resuming, "--csv", parted.csv) == expected
            assert parted.rows() == whole.rows(), (parted.rows(), whole.rows())
            # At the end there is nothing to do.
            assert mlp.hash(*arguments, *parted.resuming, "--csv", parted.csv) == expected
            assert parted.rows() == whole.rows() and parted.labels() == [(3, 6), (4, 10)], parted.labels()


def resume_by_micro_batches(mlp):
    """From 4 ranks with one micro-batch to 2 with two and back: the same weights. Only whole steps are saved."""
    many = 4 if mlp.gpus() >= 4 else 2
    if mlp.gpus() < 2:
        print("skipped: there is only one GPU")
        sys.exit(SKIPPED)
    apart, together = ["--ranks", str(many)], ["--ranks", str(many // 2), "--micro-batches", "2"]
    with Folder() as folder:
        expected = mlp.hash(*SHORT, *apart)
        mlp.hash(*SHORT, *apart, *folder.saving, "--stop-after", "3")
        mlp.hash(*SHORT, *together, *folder.resuming, "--stop-after", "6", "--save-every", "1", "--keep", "0")
        assert folder.labels() == [(1, 3), (2, 4), (3, 5), (4, 6)], folder.labels()
        for sequence, iteration in folder.labels():
            with open(folder.file(sequence, iteration, "manifest.json"), encoding="utf-8") as file:
                manifest = json.load(file)
            assert manifest["iteration"] == manifest["updates"] == iteration == int(manifest["extras"]["iteration"])
        if mlp.backend == "cuda":  # ranks are processes in between
            mlp.hash(*SHORT, "--processes", str(many), *folder.resuming, "--stop-after", "8")
        assert mlp.hash(*SHORT, *apart, *folder.resuming) == expected


def resume_on_other_ranks(mlp):
    """Fifty steps on from a checkpoint of four ranks, on other numbers of ranks: the losses of four.

    Of bf16 each rank's gradient is rounded to eight bits, in other places on other numbers of ranks: single losses stay
    within 1e-3 while they are not small, the sum of fifty always.
    """
    settings = {  # how far each loss may be, and their sum
        ("fp32",): (1e-5, 1e-5), ("fp32", "--optimizer", "sgd"): (1e-5, 1e-5),
        ("bf16-fp32-grads",): (1e-3, 1e-3), ("bf16", "--lr", "0.001"): (1e-3, 1e-3), ("bf16",): (1.0, 1e-3),
    }
    for setting, (allowed, allowed_sum) in settings.items():
        arguments = ["--precision", *setting, "--reduction", "ordered"]
        losses = {}
        with Folder() as folder:
            mlp.hash(*arguments, "--ranks", "4", *folder.saving, "--stop-after", "25")
            for ranks in (4, 1, 3, 8):
                shutil.rmtree(os.path.join(folder.path, "generation-2-iteration-75"), ignore_errors=True)
                mlp.hash(*arguments, "--ranks", str(ranks), *folder.resuming, "--stop-after", "75", "--csv", folder.csv)
                assert [row["iteration"] for row in folder.rows()] == [str(n) for n in range(26, 76)]
                losses[ranks] = [float(row["loss"]) for row in folder.rows()]
        for ranks, mine in losses.items():
            worst = max(abs(a - b) / b for a, b in zip(mine, losses[4]))
            of_sum = abs(sum(mine) / sum(losses[4]) - 1)
            print(f"{' '.join(setting)}, {ranks} ranks: each loss within {worst:.1e}, their sum {of_sum:.1e}")
            assert worst <= allowed and of_sum <= allowed_sum


def resume_refused(mlp):
    """What cannot go on is told in one line."""
    two = [*SHORT, "--ranks", str(min(2, mlp.gpus()))]
    with Folder() as folder:
        for option in (["--resume"], ["--save-every", "5"], ["--keep", "3"]):
            mlp.refuses(*option, saying=f"{option[0]} needs --checkpoint-dir")
        for option, value in (("--save-every", "0"), ("--keep", "-1"), ("--stop-after", "0"), ("--stop-after", "x")):
            mlp.refuses(*folder.saving, option, value, saying=option)
        mlp.refuses("--checkpoint-dir", DATA, saying="--checkpoint-dir: cannot write into '" + DATA)
        mlp.refuses("--checkpoint-dir", DATA + "/in", saying="Not a directory")
        anew = mlp.run(*two, *folder.resuming, "--save-every", "5")
        assert f"mlp: there is no checkpoint in '{folder.path}': the training starts anew\n" in anew.stderr, anew.stderr
        assert folder.labels() == [(1, 5), (2, 10)], folder.labels()
        mlp.refuses(*two, *folder.saving, saying=f"'{folder.path}' holds checkpoints: --resume goes on, a new training needs its own folder")
        for option, saying in (
            ("--seed 2", "generation-2-iteration-10 is of another training: --seed is 1 there, 2 here"),
            ("--batch 120 --lr 0.5", "--batch is 240 there, 120 here; --lr is 0.015 there, 0.5 here"),
            ("--epochs 3", "--epochs is 2 there, 3 here"), ("--schedule linear", "--schedule is cosine there, linear here"),
            ("--weight-decay 0.5", "--weight-decay is 0.01 there, 0.5 here"), ("--clip 3", "--clip is 2 there, 3 here"),
            ("--layers 64,10", "is not of this optimizer: parameter 'layer0.weight': shape: [128, 64] in the checkpoint, [10, 64] here"),
            ("--optimizer sgd", "rule: 'adamw' version 1 in the checkpoint, 'sgd' version 1 here"),
            ("--stop-after 9", "generation-2-iteration-10 has more iterations than this run would have, 9"),
        ):
            mlp.refuses(*two, *option.split(), *folder.resuming, saying=saying)
        note = "mlp: generation-2-iteration-10: parameters were fp32 and are bf16 here"
        other = mlp.run(*two, "--precision", "bf16", "--sharding", "per-parameter", "--bucket-bytes", "999", *folder.resuming)
        assert other.returncode == 0 and note in other.stderr, other
        # The newest is damaged: that is told, and the one before is taken. Then all are.
        expected = mlp.hash(*two)
        change_a_byte(folder.file(2, 10))
        rest = mlp.run(*two, *folder.resuming)
        assert LAST_LINE.fullmatch(rest.stdout.splitlines()[-1])[2] == expected, rest
        told = rest.stderr.splitlines()
        assert len(told) == 3 and "generation-1-iteration-5' is whole: load that" in told[0] and "generation-2" in told[0], told
        assert told[1].startswith("mlp: resumed generation-1-iteration-5") and told[2].startswith("mlp: saved generation-3"), told
        for sequence, iteration in folder.labels():
            change_a_byte(folder.file(sequence, iteration, "manifest.json"))
        mlp.refuses(*two, *folder.resuming, saying="is damaged: its checksum does not fit")


def change_a_byte(name):
    with open(name, "r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def save_fails(mlp):
    """A file that may not grow, as on a full disk: one line, and the checkpoint before stays."""

    def limit_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    with Folder() as folder:
        arguments = [*SHORT, "--ranks", "2", *folder.saving]
        mlp.hash(*arguments, "--stop-after", "5")
        assert folder.labels() == [(1, 5)], folder.labels()
        command = [*mlp.command, "--backend", mlp.backend, *arguments, "--resume", "--save-every", "1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit_files)
        lines = done.stderr.splitlines()
        assert done.returncode == 1 and len(lines) == 2 and not LAST_LINE.search(done.stdout), done
        assert "the checkpoint of iteration 6" in lines[1] and "File too large" in lines[1], lines
        assert folder.labels() == [(1, 5)] and mlp.hash(*arguments, "--resume") == mlp.hash(*SHORT, "--ranks", "2")


def resume_after_kill(mlp):
    """Killed again and again, while it trains and while it saves: in the end the same weights."""
    arguments = ["--epochs", "4", "--ranks", "4"]
    with Folder() as folder:
        expected = mlp.hash(*arguments)
        random.seed(1)
        kills = 0
        while kills < 20:
            process = start(mlp, {}, "--backend", mlp.backend, *arguments, *folder.resuming, "--save-every", "1")
            try:
                process.communicate(timeout=random.uniform(0.01, 0.4))
                break
            except subprocess.TimeoutExpired:
                process.kill()
                end(process)
                kills += 1
        print(f"killed {kills} times")
        assert kills > 0 and mlp.hash(*arguments, *folder.resuming) == expected


def output(mlp):
    lines, _, _ = mlp.train("--ranks", "2", "--epochs", "1", "--batch", "240")
    assert not any("\r" in line or "\x1b" in line for line in lines), lines
    assert sum(line.startswith("epoch 1/1  loss ") for line in lines) == 1, lines
    owned = 0
    for rank in (0, 1):
        size = re.compile(
            rf"\[ZeRO sharding\] Size of optimizer params per rank: 0\.04 MiB \(rank {rank} owns ([\d,]+) of 9,610 parameters, "
            r"\d+\.\d %; unsharded 0\.07 MiB\)")
        matches = [match for line in lines if (match := size.fullmatch(line))]
        assert len(matches) == 1, lines
        owned += int(matches[0][1].replace(",", ""))
        for moment in ("before", "after"):
            pattern = rf"\[rank {rank}\] {moment} allocation: (host|device) memory in use \d+\.\d\d MiB"
            assert sum(re.match(pattern, line) is not None for line in lines) == 1, lines
    assert owned == 9610, owned
    whole, _, _ = mlp.train("--ranks", "2", "--epochs", "1", "--batch", "240", "--zero", "0")
    assert any("rank 1 owns 9,610 of 9,610 parameters, 100.0 %" in line for line in whole), whole


def settings(mlp):
    short = ["--epochs", "1"]
    hashes = {"default": mlp.hash(*short)}
    assert mlp.hash(*short) == hashes["default"], "the same command gave other weights"
    for changed in (
        "--seed 2", "--lr 0.02", "--weight-decay 0.5", "--beta1 0.8", "--beta2 0.9", "--eps 0.1", "--optimizer adam",
        "--optimizer sgd", "--optimizer sgd --momentum 0.5", "--optimizer sgd --dampening 0.5", "--optimizer sgd --nesterov",
        "--optimizer sgd --weight-decay 0.1", "--optimizer sgd --momentum 0", "--schedule linear", "--schedule constant",
        "--warmup 9", "--clip 0.5", "--precision bf16", "--precision bf16-fp32-grads", "--batch 32", "--layers 64,10",
        "--layers 64,128,64,10", "--ranks 3",
    ):
        hashes[changed] = mlp.hash(*short, *changed.split())
    assert len(set(hashes.values())) == len(hashes), hashes
    assert "usage: mlp" in mlp.run("--help").stdout


def processes(mlp):
    """Ranks as processes that the program starts itself."""
    number = mlp.gpus()
    mlp.refuses("--processes", str(number + 1), "--batch", "1000", saying=f"--processes {number + 1}: there are only {number} GPUs")
    mlp.refuses("--processes", "2", "--ranks", "3", saying="--ranks 3: each process is one rank, and there are 2 processes")
    mlp.refuses("--processes", "2", "--backend", "host", saying="--backend host: ranks are threads there")
    two = str(min(2, number))
    mlp.refuses("--processes", two, "--batch", "1", "--micro-batches", "2", saying="too few samples for")
    mlp.refuses("--processes", two, "--optimizer", "sgd", "--nesterov", "--dampening", "0.1", saying="nesterov")
    common = ["--epochs", "1", "--batch", "240", "--reduction", "ordered", "--clip", "0.7"]
    for count in sorted({1, min(3, number)}):
        for chosen in ("--zero 1", "--zero 0", "--precision bf16"):
            arguments = [*common, *chosen.split()]
            threads, _, _ = mlp.train("--ranks", str(count), *arguments)
            started, _, _ = mlp.train("--processes", str(count), *arguments)
            assert shown(started) == shown(threads), f"{count} {chosen}\n" + "\n".join(threads + started)
    if number > 1:
        all_equal({zero: mlp.hash("--processes", "2", "--zero", zero, *common) for zero in ("0", "1")})


def shown(lines):
    """What a run prints, without what depends on the machine's state: seconds, and memory that other ranks use as well."""
    return [re.sub(r"memory in use \S+ MiB|\d+\.\d s$", "", line) for line in lines]


def places(mlp):
    """Ranks as processes that somebody else starts."""
    world = min(4, mlp.gpus())
    common = ["--epochs", "1", "--batch", "240", "--reduction", "ordered"]
    expected = mlp.hash("--ranks", str(world), *common)
    if world < 2:
        print("ranks on several GPUs: not compared, there is only one")
        return two_on_one_gpu(mlp)
    for environment in (slurm, open_mpi, torchrun):
        ends = [end(process) for process in start_ranks(mlp, world, environment, *common)]
        for code, _, errors in ends:
            assert code == 0, f"{environment.__name__}: exit code {code}\n{errors}"
        assert ends[0][1].splitlines()[-1].endswith(f"weights {expected}"), ends[0][1]
        assert all(output == "" for _, output, _ in ends[1:]), "rank 0 alone prints"
    for arguments, saying in (
        (("--ranks", str(world + 1)), f"rank 0: --ranks {world + 1}: each process is one rank, and there are {world} processes"),
        (("--processes", str(world + 1)), f"--processes {world + 1}: this is already one of {world} processes"),
        (("--backend", "host"), f"rank 0: --backend host: ranks are threads there, not {world} processes"),
    ):
        code, output, errors = end(start(mlp, slurm(0, world, free_port()), *arguments))
        assert (code, output) == (2, "") and saying in errors and errors.count("\n") == 1, (code, output, errors)
    place = {**slurm(1, world, free_port()), "SLURM_NTASKS": "500", "SLURM_PROCID": "400", "SLURM_LOCALID": "100"}
    code, _, errors = end(start(mlp, place, "--batch", "1000"))
    assert code == 2 and "rank 400: " in errors and "device 100 does not exist: this process sees " in errors, (code, errors)
    two_on_one_gpu(mlp)


SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] && shift || { echo "srun: $*" >&2; exit 9; }
for ((rank = 0; rank < WORLD; ++rank)); do
  SLURM_PROCID=$rank SLURM_NTASKS=$WORLD SLURM_LOCALID=$rank SLURM_JOB_ID=7 SLURM_STEP_NODELIST=localhost "$@" &
done
code=0
for ((rank = 0; rank < WORLD; ++rank)); do wait -n || code=$?; done
exit $code
"""


def job(mlp):
    """examples/mlp/slurm.sh as sbatch runs it, on one machine, with what stands for srun."""
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/mlp/slurm.sh")
    world = min(2, mlp.gpus())
    common = ["--epochs", "1", "--batch", "240", "--reduction", "ordered"]
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "srun"), "w", encoding="utf-8") as file:
            file.write(SRUN)
        os.chmod(file.name, 0o755)
        environment = {"PATH": f"{folder}:{os.environ['PATH']}", "WORLD": str(world), "MASTER_PORT": str(free_port())}
        code, output, errors = end(start(Mlp(mlp.backend, ["bash", script, *mlp.command]), environment, *common))
        assert code == 0, (code, output, errors)
        assert output.splitlines()[-1].endswith(f"weights {mlp.hash('--ranks', str(world), *common)}"), output
        code, output, errors = end(start(Mlp(mlp.backend, ["bash", script, *mlp.command]), environment, "--batch", "none"))
        assert (code, output) == (2, "") and "--batch" in errors, (code, output, errors)
        code, output, errors = end(start(Mlp(mlp.backend, ["bash", script]), environment))
        assert (code, output) == (2, "") and errors.startswith("usage: sbatch slurm.sh PROGRAM"), (code, output, errors)


def two_on_one_gpu(mlp):
    port = free_port()
    both = [start(mlp, {**slurm(rank, 2, port), "SLURM_LOCALID": "0"}, "--epochs", "1", "--batch", "240") for rank in (0, 1)]
    for rank, process in enumerate(both):
        code, _, errors = end(process)
        assert code == 1 and f"rank {rank} of 2 on device 0 (" in errors and "uplicate GPU" in errors, (code, errors)


def killed(mlp):
    """One of the ranks is killed or stopped in the middle: nobody hangs."""
    world = min(4, mlp.gpus())
    if world < 2:
        print("skipped: there is only one GPU")
        sys.exit(SKIPPED)
    endless = ["--epochs", "100000", "--batch", "240", "--deadline", "2"]

    launcher = start(mlp, {}, "--processes", str(world), *endless)
    launcher.stdout.readline()
    with open(f"/proc/{launcher.pid}/task/{launcher.pid}/children", encoding="ascii") as file:
        ranks = [int(pid) for pid in file.read().split()]
    assert len(ranks) == world, ranks
    code, _, errors = after(signal.SIGKILL, ranks[1], [launcher])[0]
    assert code == 128 + signal.SIGKILL, (code, errors)
    assert "mlp: signal 9 (Killed) has killed rank 1; the other ranks are stopped" in errors, errors
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks), "a rank has outlived the run"

    # Without a launcher that looks after them; what is stopped only the deadline tells.
    for sent, saying in ((signal.SIGKILL, ""), (signal.SIGSTOP, "no collective has finished for 2000 ms")):
        processes = start_ranks(mlp, world, slurm, *endless)
        processes[0].stdout.readline()
        survivors = [processes[0], *processes[2:]]
        ends = after(sent, processes[1].pid, survivors)
        for rank, (code, _, errors) in zip((0, *range(2, world)), ends):
            assert code == 1 and f"mlp: rank {rank}: " in errors and "iteration" in errors, (rank, code, errors)
        assert any(saying in errors for _, _, errors in ends), ends  # the others may hear of the first that gave up
        processes[1].kill()
        end(processes[1])


def after(sent, pid, processes):
    """Sends a signal to one process; these must end within 10 seconds."""
    time.sleep(0.5)
    os.kill(pid, sent)
    begin = time.monotonic()
    try:
        ends = [end(process, timeout=10 - (time.monotonic() - begin)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    print(f"after {sent.name} to {pid} all have ended within {time.monotonic() - begin:.1f} s")
    return ends


def start(mlp, environment, *arguments):
    return subprocess.Popen([*mlp.command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, **environment})


def start_ranks(mlp, world, environment, *arguments):
    port = free_port()
    return [start(mlp, environment(rank, world, port), *arguments) for rank in range(world)]


def end(process, timeout=600):
    output, errors = process.communicate(timeout=timeout)
    return process.returncode, output, errors


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def slurm(rank, world, port):
    """As srun sets it on one machine; the port would come from the job's number."""
    return {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(world), "SLURM_LOCALID": str(rank), "SLURM_JOB_ID": "7",
            "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(port)}


def open_mpi(rank, world, port):
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(world), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def torchrun(rank, world, port):
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port - 1), "TORCHELASTIC_USE_AGENT_STORE": "True"}


CASES = {case.__name__: case for case in (
    bad_input, gpus, accuracy, sharding, micro_batches, output, settings, processes, places, job, killed, resume, resume_by_micro_batches,
    resume_on_other_ranks, resume_refused, save_fails, resume_after_kill)} | {
    "csv": csv_rows,
}

if __name__ == "__main__":
    CASES[sys.argv[1]](Mlp(sys.argv[2], sys.argv[3:]))
