#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the program `shardopt`: every command, its output, its exit status, what it says about damage.

    program_test.py SHARDOPT CHECKPOINT_MAKER [unittest arguments]
"""

import json
import os
import pty
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as xml

PROGRAM, MAKER = sys.argv[1:3]
COMMANDS = ["inspect", "verify", "merge", "reshard", "diff", "plan"]
SLOWED_DOWN = "fsanitize" in os.environ.get("SHARDOPT_TEST_FLAGS", "")  # memory of sanitizers is not the program's


def run(*arguments):
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=300)


def on_terminal(*arguments):
    """The exit code, and all that appears where standard error is a terminal."""
    try:
        master, slave = pty.openpty()
    except OSError as error:  # such as in a chroot without /dev/pts
        raise unittest.SkipTest(f"no terminal can be made: {error}")
    process = subprocess.Popen([PROGRAM, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=slave)
    os.close(slave)
    text = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        text += piece
    os.close(master)
    return process.wait(), text.decode()


def make(directory, world, iteration=20, sharding="flat", size=None):
    arguments = [MAKER, directory, str(world), str(iteration), sharding] + ([str(size)] if size is not None else [])
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.strip()


def header_of(path):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length))


def flip_a_bit(path, from_the_end):
    with open(path, "r+b") as file:
        file.seek(-from_the_end, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-from_the_end, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def rewrite_manifest(path, change):
    """Changes the manifest of a merged file, which no checksum covers."""
    header = header_of(path)
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        data = file.read()[length:]
    manifest = json.loads(header["__metadata__"]["shardopt"])
    change(manifest)
    header["__metadata__"]["shardopt"] = json.dumps(manifest)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


class ProgramTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="shardopt-program-")
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def saved(self, name="runs", world=3, **options):
        return make(self.path(name), world, **options)

    def check(self, result, code, stdout=None, stderr=None):
        told = f"\n{result.args}\nstdout: {result.stdout}\nstderr: {result.stderr}"
        self.assertEqual(result.returncode, code, told)
        for pattern, text in ((stdout, result.stdout), (stderr, result.stderr)):
            if pattern is not None:
                self.assertRegex(text, pattern, told)
        return result


class Help(ProgramTest):
    def test_the_program_and_each_command_have_a_man_page(self):
        for command in [[]] + [[name] for name in COMMANDS]:
            result = self.check(run(*command, "--help"), 0)
            self.assertEqual(result.stderr, "")
            titles = ["NAME", "SYNOPSIS", "DESCRIPTION"] + ["COMMANDS"] * (not command)
            titles += ["OPTIONS", "EXIT STATUS", "EXAMPLES"]
            self.assertEqual(re.findall(r"^[A-Z].*$", result.stdout, re.MULTILINE), titles)
            self.assertIn("-h, --help", result.stdout)
            self.assertLessEqual(max(map(len, result.stdout.splitlines())), 80)
            self.assertEqual(run(*command, "-h").stdout, result.stdout)

    def test_the_program_names_every_command(self):
        text = run("--help").stdout
        for name in COMMANDS:
            self.assertRegex(text, rf"\n    {name}\n")

    def test_the_version_is_the_librarys(self):
        self.check(run("--version"), 0, stdout=r"^shardopt \d+\.\d+\.\d+\n$")


class Usage(ProgramTest):
    def test_what_makes_no_sense_ends_with_code_2_and_a_hint(self):
        generation = self.saved()
        for arguments, why in [
            ([], "a command is needed: inspect, verify, "),
            (["frobnicate"], "there is no command 'frobnicate'; there are inspect, "),
            (["merge"], "SOURCE is required"),
            (["merge", generation], "OUTPUT is required"),
            (["merge", generation, self.path("m.safetensors"), "more"], "more"),
            (["merge", "--frobnicate", generation, self.path("m.safetensors")], "frobnicate"),
            (["merge", generation, self.path("m.bin")], r"must end in \.safetensors"),
            (["inspect", self.path("nowhere")], "there is no '.*nowhere'"),
            (["verify", self.path("nowhere")], "there is no '.*nowhere'"),
            (["diff", generation, self.path("nowhere")], "there is no '.*nowhere'"),
            (["inspect", os.path.join(generation, "manifest.json")], "is a manifest: give the folder"),
            (["inspect", "--json", "--summary", generation], "excludes"),
            (["reshard", generation, self.path("x")], "--world is required"),
            (["reshard", "--world", "0", generation, self.path("x")], "--world must be from 1 to 1,000,000"),
            (["reshard", "--world", "3000000000", generation, self.path("x")], r"--world must be from 1 to 1,000,000\n"),
            (["reshard", "--world", "0x2", generation, self.path("x")], "'0x2' is no whole number"),
            (["reshard", "--world", "2", generation, ""], "DIRECTORY must not be empty"),
            (["reshard", "--world", "2", "--bucket-bytes", "9223372036854775807", generation, self.path("x")], "is too large"),
            (["merge", generation, self.path("nowhere", "m.safetensors")], "there is no directory '.*nowhere'"),
            (["plan", "--parameters", "9", "--svg", self.path("nowhere", "m.svg")], "there is no directory '.*nowhere'"),
            (["reshard", "--world", "many", generation, self.path("x")], "many"),
            (["reshard", "--world", "2", "--sharding", "mine", generation, self.path("x")], "--sharding: 'mine' .* flat, per-parameter, replicated"),
            (["reshard", "--world", "2", "--bucket-bytes", "32MiBs", generation, self.path("x")], "such as 32MiB"),
            (["reshard", "--world", "2", generation, generation], "is no directory for generations"),
            (["plan"], "either --parameters COUNT or a CHECKPOINT"),
            (["plan", "--parameters", "7.5Q"], "7.5B"),
            (["plan", "--parameters", "-5"], "such as 7.5B"),
            (["plan", "--parameters", "0.5"], "such as 7.5B"),
            (["plan", "--parameters", "1.5"], "such as 7.5B"),
            (["plan", "--parameters", "1.0000000000005T"], "such as 7.5B"),
            (["plan", "--parameters", "9", "--svg", self.folder, "--overwrite"], "is no regular file"),
            (["plan", "--parameters", "7B", "--rule", "adamax"], "adamw, adam, "),
            (["plan", "--parameters", "7B", "--precision", "fp8"], "fp32, bf16, "),
            (["plan", "--parameters", "7B", "--world", "0"], "from 1 to 2,147,483,647"),
            (["plan", "--parameters", "7B", "--world", "3000000000"], "from 1 to 2,147,483,647"),
            (["plan", "--parameters", "1000T", "--bucket-bytes", "1KiB"], "larger --bucket-bytes"),
        ]:
            with self.subTest(arguments=arguments):
                result = self.check(run(*arguments), 2, stdout=r"^$", stderr=why)
                self.assertRegex(result.stderr, r"\nTry 'shardopt( [a-z]+)? --help'\.\n$")
        self.assertEqual(os.listdir(self.folder), ["runs"])


class Paths(ProgramTest):
    def test_of_a_directory_the_newest_generation_is_taken_and_said(self):
        for iteration in (5, 9, 10):
            self.saved(iteration=iteration)
        runs = self.path("runs")
        result = self.check(
            run("inspect", "--summary", runs), 0, stdout=r"\niteration +10 ", stderr=r"newest of 3 generations, generation-3-iteration-10\n$"
        )
        self.assertRegex(result.stdout, r"iteration-5\n.*iteration-9\n.*iteration-10  \(the newest, shown below\)\n")
        self.check(run("inspect", "-q", "--summary", runs), 0, stderr=r"^$")
        one = os.path.join(runs, "generation-2-iteration-9")
        self.check(run("inspect", "--summary", one), 0, stdout=r"\niteration +9 ", stderr=r"^$")

    def test_a_directory_without_a_complete_checkpoint_is_a_fault(self):
        os.makedirs(self.path("runs", ".saving-1-0123456789abcdef"))
        for command in (["inspect"], ["verify"], ["merge"], ["plan"]):
            output = [self.path("m.safetensors")] if command == ["merge"] else []
            self.check(run(*command, self.path("runs"), *output), 1, stderr=r"no complete checkpoint .*1 begun and never")

    def test_a_file_that_is_no_checkpoint_is_a_fault(self):
        for name, content in (("a.safetensors", b""), ("b.safetensors", b"\x02\0\0\0\0\0\0\0{}"), ("c", b"x" * 100)):
            with open(self.path(name), "wb") as file:
                file.write(content)
            self.check(run("inspect", self.path(name)), 1, stdout=r"^$", stderr=r"^shardopt: .*" + name)


class Inspect(ProgramTest):
    def test_it_lists_names_and_files_by_their_numbers(self):
        result = self.check(run("inspect", self.saved(world=12)), 0)
        self.assertEqual(
            re.findall(r"^    (\S+) +\[", result.stdout, re.MULTILINE),
            ["embedding", "empty", "head", "layer.1.bias", "layer.1.weight", "layer.2.bias", "layer.2.weight"]
            + ["layer.10.weight", "positions", "scale"],
        )
        ranks = re.findall(r"optimizer_pp-0-of-1_dp-(\d+)-of-12\.safetensors", result.stdout)
        self.assertEqual(ranks, [str(rank) for rank in range(12)])
        self.assertRegex(result.stdout, r"rule +'adamw', version 1\n")
        self.assertRegex(result.stdout, r"'decay': lr 0\.01, .*weight_decay 0\.1")
        self.assertRegex(result.stdout, r"head +\[16, 16\] +256  \(is 'layer\.1\.weight'\)\n")
        self.assertRegex(result.stdout, r"positions +\[5, 3\] +15  \(frozen\)\n")
        self.assertRegex(result.stdout, r"'schedule': 'cosine'")

    def test_json_is_the_manifest(self):
        generation = self.saved(iteration=1234)
        manifest = json.loads(self.check(run("inspect", "--json", generation), 0).stdout)
        with open(os.path.join(generation, "manifest.json")) as file:
            expected = json.load(file)
        del expected["checksum"]
        self.assertEqual(manifest, expected)

    def test_a_merged_file_is_described_too(self):
        run("merge", self.saved(), self.path("m.safetensors"))
        self.check(run("inspect", self.path("m.safetensors")), 0, stdout=r"kind +merged file\n")


class Texts(ProgramTest):
    HOSTILE = "\x1b]0;title\x07\r\n\x7f\x9b31mé"
    CONTROLS = re.compile(r"(?!\n)[\x00-\x1f\x7f-\x9f]")

    def places(self, value, path=()):
        """Where texts stand in a manifest: (path, whether it is a name)."""
        if isinstance(value, dict):
            for key, member in value.items():
                yield (*path, key), True
                yield from self.places(member, (*path, key))
        elif isinstance(value, list):
            for index, member in enumerate(value[:2]):
                yield from self.places(member, (*path, index))
        elif isinstance(value, str):
            yield path, False

    def make_hostile(self, manifest, path, is_name):
        for step in path[:-1]:
            manifest = manifest[step]
        if is_name:
            manifest[path[-1] + self.HOSTILE] = manifest.pop(path[-1])
        else:
            manifest[path[-1]] += self.HOSTILE

    def test_no_text_of_a_checkpoint_reaches_a_terminal_as_it_is(self):
        source = self.path("m.safetensors")
        run("merge", "-q", self.saved(), source)
        manifest = json.loads(header_of(source)["__metadata__"]["shardopt"])
        for place in self.places(manifest):
            hostile = self.path("h.safetensors")
            shutil.copy(source, hostile)
            rewrite_manifest(hostile, lambda changed: self.make_hostile(changed, *place))
            for arguments in (["inspect"], ["inspect", "--json"], ["verify"], ["diff", source], ["plan"], ["reshard", "--world", "2", self.path("r")]):
                if arguments[0] == "reshard":
                    arguments = [*arguments[:-1], hostile, arguments[-1]]
                else:
                    arguments = [*arguments, hostile]
                result = run(*arguments)
                with self.subTest(place=place, arguments=arguments):
                    self.assertIn(result.returncode, (0, 1, 2))
                    self.assertIsNone(self.CONTROLS.search(result.stdout + result.stderr), result)

    def test_no_path_reaches_a_terminal_as_it_is(self):
        generation = self.saved("runs" + self.HOSTILE)
        runs = os.path.dirname(generation)
        merged = self.path(f"m{self.HOSTILE}.safetensors")
        for arguments in (
            ["inspect", runs],
            ["verify", "--all", runs],
            ["merge", runs, merged],
            ["verify", merged],
            ["reshard", "--world", "2", merged, self.path("two" + self.HOSTILE)],
            ["diff", runs, self.path("two" + self.HOSTILE)],
            ["plan", runs],
            ["plan", "--parameters", "9", "--svg", self.path(f"m{self.HOSTILE}.svg")],
            ["inspect", self.path("nowhere" + self.HOSTILE)],
            ["verify", self.path("two" + self.HOSTILE), self.folder],
            [self.HOSTILE],
            ["plan", "--" + self.HOSTILE],
        ):
            result = run(*arguments)
            with self.subTest(arguments=arguments):
                self.assertIsNone(self.CONTROLS.search(result.stdout + result.stderr), result)
                self.assertTrue(result.stdout + result.stderr)


class Verify(ProgramTest):
    def test_whole_checkpoints_end_with_code_0(self):
        first = self.saved(iteration=1)
        self.saved(iteration=2)
        self.check(run("verify", first), 0, stdout=r": whole, ", stderr=r"Reading generation-1-iteration-1: 100 %")
        result = self.check(run("verify", "-q", "--all", self.path("runs")), 0, stdout=r"^$", stderr=r"^$")
        result = self.check(run("verify", "--all", self.path("runs")), 0)
        self.assertRegex(result.stdout, r"generation-1-iteration-1: whole.*\n.*generation-2-iteration-2: whole")
        run("merge", "-q", first, self.path("m.safetensors"))
        self.check(run("verify", self.path("m.safetensors")), 0, stdout="whole")

    def test_every_kind_of_damage_is_found_and_named(self):
        def shard(rank):
            return f"optimizer_pp-0-of-1_dp-{rank}-of-12.safetensors"

        def flip(generation):
            for rank in (2, 10):
                flip_a_bit(os.path.join(generation, shard(rank)), 3)
            return r"(?s)dp-2-of-12.*is damaged.*dp-10-of-12.*is damaged"

        def cut(generation):
            os.truncate(os.path.join(generation, shard(3)), 500)
            return r"dp-3-of-12.* has 500 bytes, the manifest says"

        def remove(generation):
            os.remove(os.path.join(generation, shard(4)))
            return r"dp-4-of-12.*No such file"

        def stranger(generation):
            shutil.copy(os.path.join(generation, shard(0)), os.path.join(generation, "other.safetensors"))
            return r"other\.safetensors' is not in the manifest"

        def manifest(generation):
            flip_a_bit(os.path.join(generation, "manifest.json"), 300)
            return r"manifest\.json is damaged: its checksum does not fit"

        for number, break_it in enumerate((flip, cut, remove, stranger, manifest)):
            with self.subTest(break_it.__name__):
                generation = self.saved(f"runs{number}", world=12)
                pattern = break_it(generation)
                self.check(run("verify", generation), 1, stdout=r"\d faults?\n$", stderr=pattern)
                self.check(run("verify", "-q", generation), 1, stdout=r"^$", stderr=pattern)

    def test_of_several_all_are_read(self):
        good, bad = self.saved("good"), self.saved("bad")
        flip_a_bit(os.path.join(bad, "optimizer_pp-0-of-1_dp-1-of-3.safetensors"), 3)
        self.check(run("verify", bad, good), 1, stdout=r"1 fault\n.*whole")
        os.mkdir(self.path("empty"))
        for arguments in ([], ["--all"]):
            self.check(run("verify", *arguments, self.path("empty"), good), 1, stdout=r"^\S+: whole", stderr="empty")


class Merge(ProgramTest):
    def test_it_writes_whole_tensors_and_says_so(self):
        generation, output = self.saved(), self.path("m.safetensors")
        result = self.check(run("merge", generation, output), 0, stdout=r"m\.safetensors: 24 tensors, .*iteration 20\n$")
        lines = result.stderr.splitlines()
        self.assertRegex(lines[-1], r"^Merging ZeRO-1 shards: 100 % \((\S+ \S+) of \1\)$")
        header = header_of(output)
        self.assertEqual(header["layer.10.weight/exp_avg"]["shape"], [3, 101])
        self.assertEqual(len(header), 25)
        self.assertEqual(sorted(os.listdir(self.folder)), ["m.safetensors", "runs"])

    def test_progress_is_a_bar_on_a_terminal_lines_in_a_log_and_nothing_if_quiet(self):
        generation = self.saved(size=1_000_000)
        code, text = on_terminal("merge", generation, self.path("a.safetensors"))
        self.assertEqual(code, 0)
        self.assertRegex(text, r"\rMerging ZeRO-1 shards \[[#.]{30}\] +\d+ %")
        self.assertRegex(text, r"\rMerging ZeRO-1 shards \[#{30}\] 100 %.*\r?\n$")
        log = self.check(run("merge", generation, self.path("b.safetensors")), 0).stderr
        self.assertNotIn("\r", log)
        self.assertRegex(log, r"^(Merging ZeRO-1 shards: \d+ % \(.*\)\n){2,11}$")
        self.check(run("merge", "--quiet", generation, self.path("c.safetensors")), 0, stdout=r"^$", stderr=r"^$")
        code, text = on_terminal("merge", "-q", generation, self.path("d.safetensors"))
        self.assertEqual((code, text), (0, ""))

    def test_an_existing_file_is_replaced_only_if_told_to(self):
        generation, output = self.saved(), self.path("m.safetensors")
        with open(output, "w") as file:
            file.write("precious")
        self.check(run("merge", generation, output), 2, stderr=r"exists; --overwrite replaces it")
        with open(output) as file:
            self.assertEqual(file.read(), "precious")
        self.check(run("merge", "--overwrite", generation, output), 0)
        self.assertIn("scale", header_of(output))

    def test_damage_ends_with_code_1_and_no_output(self):
        generation = self.saved()
        flip_a_bit(os.path.join(generation, "optimizer_pp-0-of-1_dp-2-of-3.safetensors"), 3)
        self.check(run("merge", generation, self.path("m.safetensors")), 1, stdout=r"^$", stderr=r"dp-2-of-3.*is damaged")
        self.check(run("merge", self.saved("b"), "/proc/m.safetensors"), 1, stderr="open of '/proc/")
        self.assertEqual(sorted(os.listdir(self.folder)), ["b", "runs"])

    def test_memory_does_not_grow_with_the_checkpoint(self):
        if SLOWED_DOWN:
            self.skipTest("sanitizers take memory of their own")
        generation = self.saved(size=8_000_000)  # 96 MB
        for arguments in (
            ["merge", generation, self.path("m.safetensors")],
            ["reshard", "--world", "5", generation, self.path("r")],
            ["diff", generation, self.path("m.safetensors")],
        ):
            pid = os.posix_spawn(PROGRAM, [PROGRAM, arguments[0], "-q", *arguments[1:]], os.environ)
            _, status, usage = os.wait4(pid, 0)
            self.assertEqual(status, 0)
            self.assertLess(usage.ru_maxrss, 24 * 1024)  # KiB; the program itself takes some 6 MiB


class Reshard(ProgramTest):
    def test_it_adds_a_generation_with_the_same_content(self):
        generation = self.saved()
        result = self.check(
            run("reshard", "--world", "7", "--sharding", "per-parameter", "--bucket-bytes", "4KiB", generation, self.path("seven")),
            0,
            stdout=r"generation-1-iteration-20: .*, 3 to 7 ranks\n$",
            stderr=r"Resharding to 7 ranks: 100 %",
        )
        made = result.stdout.split(":")[0]
        self.check(run("verify", "-q", made), 0)
        manifest = json.loads(run("inspect", "--json", made).stdout)
        self.assertEqual((manifest["world"], manifest["sharding"]), (7, "per-parameter"))
        self.check(run("diff", generation, made), 0, stdout=r"^24 tensors compared: the same bits\n$", stderr="world: 3 in A, 7 in B")

    def test_numbers_of_ranks_are_decimal(self):
        self.check(run("reshard", "--world", "010", self.saved(), self.path("ten")), 0, stdout=r", 3 to 10 ranks\n$")

    def test_it_is_quiet_if_told_to_and_takes_merged_files(self):
        generation = self.saved()
        run("merge", "-q", generation, self.path("m.safetensors"))
        self.check(run("reshard", "-q", "--world", "2", self.path("m.safetensors"), self.path("two")), 0, stdout=r"^$", stderr=r"^$")
        self.check(run("diff", "-q", self.path("two"), generation), 0, stdout=r"^$", stderr=r"^$")

    def test_a_policy_of_the_users_own_needs_another_one(self):
        run("merge", "-q", self.saved(), self.path("m.safetensors"))
        rewrite_manifest(self.path("m.safetensors"), lambda manifest: manifest.update(sharding="mine"))
        arguments = ["reshard", "--world", "2", self.path("m.safetensors"), self.path("two")]
        self.check(run(*arguments), 2, stderr="has a sharding policy of the user's, 'mine': choose another by --sharding")
        self.check(run(*arguments, "--sharding", "flat"), 0)

    def test_damage_ends_with_code_1_and_no_generation(self):
        generation = self.saved()
        flip_a_bit(os.path.join(generation, "optimizer_pp-0-of-1_dp-0-of-3.safetensors"), 3)
        self.check(run("reshard", "--world", "2", generation, self.path("two")), 1, stderr=r"dp-0-of-3.*is damaged")
        self.assertEqual(os.listdir(self.path("two")), [])


class Diff(ProgramTest):
    def test_no_difference_is_code_0_and_differences_are_code_1(self):
        a = self.saved("a", world=3)
        b = self.saved("b", world=5, sharding="per-parameter")
        self.check(run("diff", a, b), 0, stdout=r"^24 tensors compared: the same bits\n$", stderr=r"note: world: 3 in A, 5 in B\n")
        c = self.saved("c", iteration=21)
        self.check(run("diff", a, c), 1, stdout=r"^iteration: 20 in A, 21 in B\nupdates: 19 in A, 20 in B\n")
        self.check(run("diff", "-q", a, c), 1, stdout=r"^$", stderr=r"^$")

    def test_it_lists_tensors_by_their_numbers(self):
        generation = self.saved()
        run("merge", "-q", generation, self.path("m.safetensors"))
        header = header_of(self.path("m.safetensors"))
        size = os.path.getsize(self.path("m.safetensors"))
        data = size - max(t["data_offsets"][1] for name, t in header.items() if name != "__metadata__")
        with open(self.path("m.safetensors"), "r+b") as file:
            for name in ("layer.10.weight/exp_avg", "layer.2.weight"):
                file.seek(data + header[name]["data_offsets"][0] + 4 * 7)
                file.write(struct.pack("<f", 0.0))
        result = self.check(run("diff", generation, self.path("m.safetensors")), 1)
        self.assertEqual(
            result.stdout,
            "'layer.2.weight': 1 of 771 elements differ, by at most 5.01e+03; the first is element 7: 5007.5 in A, 0 in B\n"
            "'layer.10.weight/exp_avg': 1 of 303 elements differ, by at most 6.11e+03; the first is element 7: 6107.5 in A, 0 in B\n"
            "2 of 24 tensors differ\n",
        )

    def test_damage_is_an_error_on_either_side(self):
        a, b = self.saved("a"), self.saved("b")
        flip_a_bit(os.path.join(b, "optimizer_pp-0-of-1_dp-1-of-3.safetensors"), 3)
        for arguments in ((a, b), (b, a)):
            self.check(run("diff", *arguments), 1, stdout=r"^$", stderr=r"dp-1-of-3.*is damaged")


class Plan(ProgramTest):
    def test_the_table_holds_the_known_bytes_per_parameter(self):
        result = self.check(run("plan", "--parameters", "7.5B", "--world", "1,64"), 0)
        for series, unsharded, sharded in (
            ("AdamW, fp32", "16.000", "8.125"),
            ("AdamW, bf16, fp32 masters", "16.000", "4.188"),
            ("AdamW, bf16, fp32 gradients and masters", "18.000", "6.188"),
        ):
            rows = result.stdout.split(f"\n{series}\n")[1].splitlines()[1:3]
            self.assertEqual(rows[0].split()[0], "1")
            self.assertIn(f" {unsharded} ", rows[0])
            self.assertEqual(rows[1].split()[0], "64")
            self.assertIn(f" {sharded} ", rows[1])
        self.assertIn("31.4 GB", result.stdout)

    def test_counts_are_taken_as_they_are_written(self):
        for text, count in (
            ("8.03B", 8_030_000_000),
            ("1.07B", 1_070_000_000),
            ("32.76B", 32_760_000_000),
            ("2.01M", 2_010_000),
            ("1.3e9", 1_300_000_000),
            ("9610", 9610),
        ):
            with self.subTest(text):
                result = self.check(run("plan", "--parameters", text, "--world", "1", "--json"), 0)
                self.assertEqual(json.loads(result.stdout)["parameters"], count)

    def test_json_holds_bytes(self):
        plans = json.loads(
            self.check(run("plan", "--parameters", "1e6", "--world", "4", "--precision", "bf16", "--rule", "sgd-momentum,adam", "--json"), 0).stdout
        )
        self.assertEqual(plans["parameters"], 1_000_000)
        sgd, adam = plans["plans"]
        self.assertEqual((sgd["rule"], sgd["precision"], sgd["world"]), ("sgd-momentum", "bf16", 4))
        self.assertEqual((sgd["parameter_bytes"], sgd["gradient_bytes"]), (2_000_000, 2_000_000))
        self.assertEqual(sgd["state_bytes"], sgd["master_bytes"])
        self.assertEqual(adam["state_bytes"], 2 * adam["master_bytes"])
        self.assertAlmostEqual(adam["owned_parameters"], 250_000, delta=512)

    def test_the_plan_of_a_checkpoint_is_for_what_it_was_trained_with(self):
        result = self.check(run("plan", "--world", "1,3", "--json", self.saved()), 0)
        plans = json.loads(result.stdout)
        elements = 303 + 771 + 1 + 1 + 256 + 255 + 2018
        self.assertEqual(plans["parameters"], elements)
        self.assertEqual({(p["rule"], p["precision"], p["sharding"]) for p in plans["plans"]}, {("adamw", "fp32", "flat")})
        self.assertEqual(plans["plans"][0]["state_bytes"], 8 * elements)

    def test_the_plot_is_an_svg_with_title_axes_and_a_bar_for_each_part(self):
        output = self.path("memory.svg")
        arguments = ["plan", "--parameters", "7.5B", "--world", "1,8,64", "--precision", "fp32,bf16", "--svg", output]
        self.check(run(*arguments), 0, stdout=r"^$")
        root = xml.parse(output).getroot()
        space = "{http://www.w3.org/2000/svg}"
        self.assertEqual(root.tag, space + "svg")
        texts = [element.text for element in root.iter(space + "text")]
        for text in ("Memory of one rank, 7,500,000,000 parameters", "AdamW, fp32", "AdamW, bf16, fp32 masters"):
            self.assertIn(text, texts)
        self.assertEqual(texts.count("memory of one rank (GB)"), 2)
        self.assertEqual(texts.count("ranks that share the optimizer state (world size)"), 2)
        for part in ("parameters", "gradients", "states", "masters"):
            self.assertIn(part, texts)
        bars = [element for element in root.iter(space + "rect") if ": " in (element.findtext(space + "title") or "")]
        self.assertEqual(len(bars), 3 * 3 + 3 * 4)  # fp32 has no masters
        width, height = float(root.get("width")), float(root.get("height"))
        for bar in bars:
            self.assertGreater(float(bar.get("height")), 0)
            self.assertLessEqual(float(bar.get("x")) + float(bar.get("width")), width)
            self.assertGreaterEqual(float(bar.get("y")), 0)
            self.assertLessEqual(float(bar.get("y")) + float(bar.get("height")), height)
        self.check(run(*arguments), 2, stderr=r"exists; --overwrite replaces it")
        self.check(run(*arguments, "--overwrite", "-q"), 0, stderr=r"^$")

    def test_a_plot_that_cannot_be_written_is_code_1(self):
        self.check(run("plan", "--parameters", "9", "--svg", "/proc/m.svg"), 1, stderr="cannot be written")

    def test_a_plot_gets_its_name_when_it_is_complete(self):
        output = self.path("m.svg")
        arguments = [PROGRAM, "plan", "--parameters", "9", "--overwrite", "--svg", output]

        def little_room():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

        for content in (None, "precious"):
            if content:
                with open(output, "w") as file:
                    file.write(content)
            result = subprocess.run(arguments, capture_output=True, text=True, timeout=300, preexec_fn=little_room)
            self.check(result, 1, stderr=r"m\.svg' cannot be written: .*File too large")
            self.assertEqual(os.listdir(self.folder), ["m.svg"] if content else [])
        with open(output) as file:
            self.assertEqual(file.read(), "precious")
        self.check(run(*arguments[1:]), 0)
        self.assertEqual(os.listdir(self.folder), ["m.svg"])
        xml.parse(output)

    def test_names_in_a_plot_are_escaped(self):
        make(self.path('a&b"<c>'), 2)
        self.check(run("plan", "--svg", self.path("m.svg"), self.path('a&b"<c>')), 0)
        root = xml.parse(self.path("m.svg")).getroot()
        self.assertIn('a&b"<c>', "".join(root.itertext()))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
