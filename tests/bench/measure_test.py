#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/measure.py, bench/peers.py and the folder that is packed, with scripts in the place of programs for the GPU.

    measure_test.py [unittest arguments]
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

BENCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../bench")
FIGURES = {"elements": 1024, "device": "Double", "devices": 2, "figures": [
    {"name": "copy", "bytes_per_element": 8, "gigabytes_per_second": 200.0, "of_copy": 1.0},
    {"name": "update", "bytes_per_element": 28, "gigabytes_per_second": 100.0, "of_copy": 0.5}]}
GOOD_FIGURES = f"echo warming up >&2; echo '{json.dumps(FIGURES)}'"


def nvbench_state(elements, **fields):
    """As nvbench 0.3.0 writes it: numbers are strings, what is empty is null, a skipped state has no summaries."""
    return {"name": f"elements=2^{elements}", "device": 0, "type_config_index": 0, "summaries": None, "is_skipped": False,
            "axis_values": [{"name": "rule", "type": "string", "value": "AdamW"}, {"name": "elements", "type": "int64", "value": str(2**elements)}], **fields}


def nvbench_summary(tag, value):
    return {"tag": tag, "name": tag, "hint": "duration", "data": [{"name": "value", "type": "float64", "value": value}]}


MEASURED = [nvbench_summary("nv/cold/sample_size", "30"), nvbench_summary("nv/cold/time/gpu/mean", "1.25e-05"),
            nvbench_summary("nv/cold/bw/global/bytes_per_second", "1.5e+11")]


def nvbench_double(*states, content=None):
    """Writes what nvbench would into the file after --json, and its arguments into the output."""
    content = content or {"devices": [], "benchmarks": [{"name": "update", "index": 0, "axes": None, "states": list(states)}]}
    return f'''echo "$*"; while [ "$1" != --json ]; do shift; done; cat >"$2" <<'END'\n{json.dumps(content)}\nEND'''


def state_of(process):
    """A letter of /proc, or `gone`."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


class Folder(unittest.TestCase):
    def setUp(self):
        self.place = tempfile.mkdtemp(prefix="shardopt-measure-")
        self.addCleanup(shutil.rmtree, self.place)
        self.environment = {**os.environ, "SHARDOPT_GPU_LAUNCHER": "env THROUGH=launcher",
                            "SHARDOPT_PEERS_PYTHON": self.script("python", "echo skipped: no PyTorch here; exit 77")}

    def path(self, *words):
        return os.path.join(self.place, *words)

    def script(self, where, text):
        path = self.path(where)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"#!/bin/bash\n{text}\n")
        os.chmod(path, 0o755)
        return path

    def read(self, *words):
        with open(self.path(*words), encoding="utf-8") as file:
            return file.read()

    def assert_ended(self, process):
        for _ in range(50):
            if state_of(process) in ("gone", "Z"):
                return
            time.sleep(0.1)
        self.fail(f"process {process} still runs")

    def call(self, *command, **environment):
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={**self.environment, **environment})

    def measure(self, *arguments):
        return self.call(sys.executable, os.path.join(BENCH, "measure.py"), *arguments)


class Run(Folder):
    def write_manifest(self, tests=(), **programs):
        manifest = {"commit": "0123456789abcdef", "programs": {}, "tests": []}
        for name, text in programs.items():
            manifest["programs"][name] = os.path.relpath(self.script(f"bin/{name}", text), self.place)
        for name, text in tests:
            self.script(f"bin/test{len(manifest['tests'])}", text)
            manifest["tests"].append({"name": name, "command": [f"bin/test{len(manifest['tests'])}"], "skip_code": 4})
        with open(self.path("manifest.json"), "w", encoding="utf-8") as file:
            json.dump(manifest, file)

    def run_with(self, tests=(), *arguments, **programs):
        """What `measure.py run` makes of tests (name and script) and programs (scripts): the process, results.json, results.md."""
        self.write_manifest(tests, **programs)
        process = self.measure("run", self.place, self.path("results"), *arguments)
        self.assertNotIn("Traceback", process.stderr)
        results, text = json.loads(self.read("results/results.json")), self.read("results/results.md")
        self.assertIn(text, process.stdout)
        return process, results, text

    def notes(self, results, begin):
        return [note for note in results["notes"] if note.startswith(begin)]

    def test_figures_through_the_launcher(self):
        process, results, text = self.run_with((), "--elements", "1024", figures=f'[ "$THROUGH$1" = launcher1024 ] || exit 3; {GOOD_FIGURES}',
                                               overlap='echo "$* 7.25"')
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertEqual(results["figures"], FIGURES["figures"])
        self.assertEqual((results["commit"], results["elements"]), ("0123456789abcdef", 1024))
        self.assertIn("| update | 28 | 100.0 | 0.500 |", text)
        self.assertIn("2^10 elements", text)
        self.assertIn("2 x Double", text)
        self.assertIn("Commit 0123456789abcdef", text)
        # 2 devices, as figures says; 1024 parameters in 16 layers of 256 bytes.
        self.assertIn("takes 2 1024 16 256 1024 10 7.25 ms", self.notes(results, "overlap")[0])

    def test_complaints_of_nvidia_smi_are_no_gpus(self):
        self.script("none/nvidia-smi", "echo it has failed; exit 9")
        self.environment["PATH"] = f"{self.path('none')}:{os.environ['PATH']}"
        _, results, text = self.run_with(overlap="echo 1")
        self.assertEqual((results["machine"]["gpus"], self.notes(results, "overlap")), ([], ["overlap: skipped: needs 2 GPUs, there are 0"]))
        self.assertIn("no GPU named", text)

    def test_a_program_that_fails_is_named_and_the_others_run(self):
        process, results, text = self.run_with([("a: passes", "exit 0")], figures="echo no such device >&2; exit 9", overlap="exit 1")
        self.assertEqual(process.returncode, 1)
        self.assertIn("exit code 9: no such device", self.notes(results, "figures: FAILED")[0])
        self.assertEqual([test["outcome"] for test in results["tests"]], ["passed"])
        self.assertIn("figures: FAILED", text)

    def test_output_that_is_no_json_is_a_failure(self):
        process, results, _ = self.run_with(figures="echo '{\"elements\": 4, '")
        self.assertEqual(process.returncode, 1)
        self.assertTrue(self.notes(results, "figures: FAILED"))

    def test_outcomes_of_tests(self):
        process, results, text = self.run_with([
            ("a: passes", '[ "$THROUGH" = launcher ]'), ("a: fails", "echo seven is not eight; exit 1"), ("a: is killed", "kill -SEGV $$"),
            ("a: fails four times", "echo 'assertions: 4 | 4 failed'; exit 4"),
            ("a: skips", "echo 'explicitly with message:'; echo '  needs 2 GPUs'; exit 4"),
            ("a: has no nccl", "echo 'x: error while loading shared libraries: libnccl.so.2: no such file'; exit 127")])
        self.assertEqual(process.returncode, 1)
        by_name = {test["name"]: test for test in results["tests"]}
        self.assertEqual({name: test["outcome"] for name, test in by_name.items()}, {
            "a: passes": "passed", "a: fails": "failed", "a: fails four times": "failed", "a: is killed": "failed", "a: skips": "skipped", "a: has no nccl": "skipped"})
        self.assertIn("seven is not eight", by_name["a: fails"]["output"])
        self.assertEqual(by_name["a: skips"]["reason"], "needs 2 GPUs")
        self.assertIn("Tests: 3 failed, 1 passed, 2 skipped.", text)
        self.assertIn("- FAILED: a: fails: exit code 1", text)
        self.assertIn("FAILED: a: is killed", process.stderr)

    def test_tests_keep_logs_apart(self):
        name = "a: " + 130 * "x"
        self.run_with([(name + " one", "echo first"), (name + " two", "echo second")])
        logs = []
        for log in sorted(os.listdir(self.path("results/logs"))):
            with open(self.path("results/logs", log), encoding="utf-8") as file:
                logs.append(file.read())
        self.assertEqual(logs[:2], ["first\n", "second\n"])

    def test_a_test_that_hangs_is_stopped_and_what_follows_still_runs(self):
        hangs = f"sleep 100 & echo $! >{self.path('child')}; wait"
        process, results, _ = self.run_with([("a: hangs", hangs)], "--minutes", "0.1", overlap="echo 1", figures=GOOD_FIGURES)
        self.assertEqual(process.returncode, 1)
        self.assertEqual(results["tests"][0]["reason"], "it ran out of time")
        self.assertIn("takes 1 ms", self.notes(results, "overlap")[0])
        self.assertLess(results["seconds"], 20)
        self.assert_ended(self.read("child").strip())

    def test_nothing_that_a_test_started_outlives_it(self):
        self.run_with([("a: leaves a child", f"sleep 100 & echo $! >{self.path('child')}")])
        self.assert_ended(self.read("child").strip())

    def test_stopped_it_stops_what_it_runs(self):
        self.write_manifest([("a: hangs", f"sleep 100 & echo $! >{self.path('child')}; wait")])
        command = [sys.executable, os.path.join(BENCH, "measure.py"), "run", self.place, self.path("results")]
        with subprocess.Popen(command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while not os.path.exists(self.path("child")) or not self.read("child"):
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            self.assertEqual(process.wait(timeout=20), 128 + signal.SIGTERM)
        self.assert_ended(self.read("child").strip())

    def test_tests_that_time_leaves_out_are_a_failure(self):
        process, results, text = self.run_with([("a: one", "exit 0")], "--minutes", "0.01")
        self.assertEqual((process.returncode, results["tests"][0]["outcome"]), (1, "not run"))
        self.assertIn("tests: FAILED: 1 could not be run in time", text)

    def test_a_run_in_which_no_test_passes_is_a_failure(self):
        process, results, _ = self.run_with([("a: skips", "echo skipped: needs 2 GPUs; exit 4")])
        self.assertEqual((process.returncode, self.notes(results, "tests")), (1, ["tests: FAILED: none passed"]))

    def test_results_of_an_earlier_run_are_gone(self):
        self.run_with([("a: one", "exit 0")], bench_norm=nvbench_double(nvbench_state(20, summaries=MEASURED)))
        process, results, _ = self.run_with(bench_norm="exit 0")
        self.assertEqual((process.returncode, results["benches"]), (1, []))
        self.assertEqual(sorted(os.listdir(self.path("results/logs"))), ["bench_norm.txt", "peers.txt"])

    def test_a_program_that_is_not_there(self):
        self.write_manifest(figures=GOOD_FIGURES)
        os.remove(self.path("bin/figures"))
        process = self.measure("run", self.place, self.path("results"))
        self.assertEqual(process.returncode, 1)
        self.assertIn("figures: FAILED: exit code 127", process.stdout)

    def test_bad_options(self):
        self.write_manifest()
        with open(self.path("file"), "w", encoding="utf-8"):
            pass
        for arguments, text in (
                ((self.place, self.path("results"), "--elements", "0"), "'0' is no number of elements"),
                ((self.place, self.path("results"), "--elements", "1e9"), "'1e9' is no number of elements"),
                ((self.place, self.path("results"), "--minutes", "nan"), "'nan' is no number of minutes"),
                ((self.place, self.path("results"), "--tests", "("), "'(' is no regular expression"),
                ((self.path("nowhere"), self.path("results")), self.path("nowhere/manifest.json")),
                ((self.place, self.path("file")), self.path("file"))):
            process = self.measure("run", *arguments)
            self.assertNotEqual(process.returncode, 0)
            self.assertIn(text, process.stderr)
            self.assertNotIn("Traceback", process.stderr)
        self.assertEqual(self.measure("run", "nowhere", "nowhere", "--check", "--minutes", "3").returncode, 0)

    def test_some_tests(self):
        tests = [("a: one", "exit 1"), ("b: two", "exit 0")]
        process, results, _ = self.run_with(tests, "--tests", "^b:")
        self.assertEqual((process.returncode, [test["name"] for test in results["tests"]]), (0, ["b: two"]))
        process, results, _ = self.run_with(tests, "--tests", "^c:")
        self.assertEqual(process.returncode, 1, "a pattern that matches no test must not look like success")
        self.assertIn("'^c:'", self.notes(results, "tests: FAILED")[0])

    def test_nvbench(self):
        process, results, text = self.run_with(figures=GOOD_FIGURES, bench_update=nvbench_double(
            nvbench_state(20, summaries=MEASURED), nvbench_state(28, is_skipped=True, skip_reason="not enough memory"),
            nvbench_state(20, name="", axis_values=None, summaries=MEASURED)))
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertEqual(results["benches"][0], {"name": "update: AdamW, 1048576", "microseconds": 12.5, "gigabytes_per_second": 150.0})
        self.assertEqual(results["benches"][1]["name"], "update: ")
        self.assertIn("| update: AdamW, 1048576 | 12.5 | 150.0 |  |", text, "figures' copy has another size")
        self.assertEqual(self.notes(results, "update"), ["update elements=2^28: not enough memory"])

    def test_nvbench_beside_its_own_copy(self):
        copy = nvbench_state(30, axis_values=[{"name": "bytes", "type": "int64", "value": str(2**30)}],
                             summaries=[nvbench_summary("nv/cold/time/gpu/mean", "1"), nvbench_summary("nv/cold/bw/global/bytes_per_second", "2e11")])
        content = {"benchmarks": [{"name": "copy", "states": [copy]}, {"name": "update", "states": [nvbench_state(20, summaries=MEASURED)]}]}
        _, _, text = self.run_with(bench_update=nvbench_double(content=content))
        self.assertIn("| update: AdamW, 1048576 | 12.5 | 150.0 | 0.750 |", text)
        arguments = self.read("results/logs/bench_update.txt").split()
        for option in ("--devices", "--no-batch", "--timeout", "--json"):  # behind -b they would be for that benchmark only
            self.assertLess(arguments.index(option), arguments.index("-b"))
        self.assertEqual(arguments[arguments.index("-b"):], ["-b", "copy", "-a", "bytes[pow2]=30", "-b", "update", "-a", "elements[pow2]=[20,28]"])

    def test_nvbench_is_left_out_on_request(self):
        process, results, _ = self.run_with((), "--without-nvbench", bench_update="exit 1", figures=GOOD_FIGURES)
        self.assertEqual((process.returncode, self.notes(results, "bench")), (0, []))

    def test_nvbench_whose_file_is_broken_is_a_failure_and_the_rest_runs(self):
        no_data = {"benchmarks": [{"name": "update", "states": [nvbench_state(20, summaries=[{"tag": "x", "data": None}])]}]}
        for broken in ('while [ "$1" != --json ]; do shift; done; echo "{" >"$2"', nvbench_double(content={"benchmarks": [{"name": "x"}]}),
                       nvbench_double(content={"benchmarks": None}), nvbench_double(content={"benchmarks": [{"name": "x", "states": None}]}),
                       nvbench_double(content=no_data)):
            process, results, _ = self.run_with(bench_update=broken, bench_norm=nvbench_double(nvbench_state(20, summaries=MEASURED)))
            self.assertEqual((process.returncode, len(results["benches"])), (1, 1))
            self.assertTrue([note for note in results["notes"] if "FAILED" in note])

    def test_nvbench_that_fails_is_a_failure(self):
        process, results, _ = self.run_with(bench_norm=nvbench_double(nvbench_state(20, summaries=MEASURED)) + "\nexit 3")
        self.assertEqual((process.returncode, results["benches"]), (1, []))

    def test_nvbench_that_threw_is_a_failure(self):
        process, results, _ = self.run_with(bench_norm=nvbench_double(
            nvbench_state(20, summaries=MEASURED), nvbench_state(28, is_skipped=True, skip_reason="Unexpected error: an illegal access")))
        self.assertEqual(process.returncode, 1)
        self.assertEqual(self.notes(results, "update"), ["update elements=2^28: FAILED: Unexpected error: an illegal access"])

    def test_nvbench_that_measured_nothing_is_a_failure(self):
        for states in ([], [nvbench_state(20)], [nvbench_state(20, is_skipped=True, skip_reason="no memory")]):
            process, results, _ = self.run_with(bench_step=nvbench_double(*states))
            self.assertEqual(process.returncode, 1)
            self.assertTrue(self.notes(results, "bench_step: FAILED: it measured nothing"), results["notes"])

    def test_overlap_without_nccl_is_skipped(self):
        process, results, _ = self.run_with(figures=GOOD_FIGURES, overlap="echo 'error while loading shared libraries: libnccl.so.2'; exit 127")
        self.assertEqual((process.returncode, self.notes(results, "overlap")), (0, ["overlap: skipped: libnccl.so.2 is not on this machine"]))

    def test_peers_beside_the_figures(self):
        peers = {"elements": 1024, "torch": "9.9", "figures": [{"name": "PyTorch: copy", "bytes_per_element": 8, "gigabytes_per_second": 150.0, "of_copy": 1.0}]}
        self.script("python", f'[ "$2" = 1024 ] && echo \'{json.dumps(peers)}\'')
        process, results, text = self.run_with((), "--elements", "1024", figures=GOOD_FIGURES)
        self.assertEqual((process.returncode, results["torch"]), (0, "9.9"), process.stderr)
        self.assertIn("| PyTorch: copy | 8 | 150.0 | 0.750 |", text)
        self.script("python", "echo out of memory; exit 1")
        process, results, _ = self.run_with()
        self.assertEqual((process.returncode, self.notes(results, "peers")), (1, ["peers: FAILED: exit code 1: out of memory"]))

    def test_what_was_not_built_is_said(self):
        process, results, _ = self.run_with()
        self.assertEqual(process.returncode, 0)
        self.assertEqual(self.notes(results, "peers"), ["peers: skipped: no PyTorch here"])
        for name in ("figures", "tests", "bench_update", "bench_norm", "bench_step", "overlap"):
            self.assertEqual(self.notes(results, name), [f"{name}: not built"])


class Pack(Folder):
    def build(self, name, tests, programs=("bench/figures",), nvbench="OFF", text=GOOD_FIGURES):
        """A build folder as CMake leaves it."""
        where = self.path(name)
        os.makedirs(where, exist_ok=True)
        on_gpu = self.script("on_gpu.sh", 'exec "$@"')
        with open(os.path.join(where, "CTestTestfile.cmake"), "w", encoding="utf-8") as file:
            for test, command, properties in tests:
                words = " ".join(f'"{word}"' for word in command)
                file.write(f'add_test("{test}" "{on_gpu}" {words})\nset_tests_properties("{test}" PROPERTIES {properties})\n')
        with open(os.path.join(where, "CMakeCache.txt"), "w", encoding="utf-8") as file:
            file.write(f"CMAKE_CTEST_COMMAND:INTERNAL={shutil.which('ctest')}\nSHARDOPT_NVBENCH:BOOL={nvbench}\n"
                       f"nvbench_DIR:PATH={self.path('nvbench/lib/cmake/nvbench')}\n")
        for program in programs:
            self.script(f"{name}/{program}", text)
        return where

    def test_a_folder_that_runs_by_itself(self):
        golden = self.path("golden.txt")
        with open(golden, "w", encoding="utf-8") as file:
            file.write("42\n")
        program = self.script("build/tests/test_cuda", '[ "$1" = case ] && [ "$(cat "$2")" = 42 ] && cd "$(dirname "$0")" && exec ./helper')
        helper = self.script("build/tests/helper", 'cd "$(dirname "$0")/../lib" && case :$LD_LIBRARY_PATH: in *:$PWD:*) exit 0 ;; esac; exit 1')
        scripted = self.script("build/tests/around.sh", "exit 0")
        build = self.build("build", [
            ("cuda: quick", [program, "case", golden], "LABELS quick"), ("cuda: carried", [helper], "LABELS quick"),
            ("cuda: slow", [program], "LABELS full"), ("cuda: faults", [program], 'LABELS quick ENVIRONMENT "SHARDOPT_TEST_FAULTS=x"')])
        with open(os.path.join(build, "CTestTestfile.cmake"), "a", encoding="utf-8") as file:  # not a program that could run alone
            file.write(f'add_test("cuda: scripted" "{scripted}" "{self.path("on_gpu.sh")}" x)\nset_tests_properties("cuda: scripted" PROPERTIES LABELS quick)\n')
            file.write(f'add_test("host: quick" "{scripted}")\nset_tests_properties("host: quick" PROPERTIES LABELS quick)\nadd_test(test_host_NOT_BUILT nothing)\n')
        bench = self.build("bench", [], ["bench/figures", "bench/overlap", "bench/nvbench/bench_norm"], "ON", "exit 1")
        os.makedirs(self.path("nvbench/lib/cmake/nvbench"))
        with open(self.path("nvbench/lib/libnvbench.so"), "w", encoding="utf-8"):
            pass
        folder = self.path("folder")
        process = self.measure("pack", build, bench, folder)
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertIn("3 programs, 2 tests", process.stderr)
        for name in ("build", "bench", "nvbench", "golden.txt", "on_gpu.sh"):  # all that the folder came from is gone, and it is elsewhere
            (shutil.rmtree if os.path.isdir(self.path(name)) else os.remove)(self.path(name))
        os.rename(folder, self.path("else where"))
        for program in os.listdir(self.path("else where/bin")):  # as some ways of copying leave it
            os.chmod(self.path("else where/bin", program), 0o644)
        process = self.call(self.path("else where/run"), "--elements", "1024", "--tests", "cuda", "--without-nvbench")
        self.assertNotIn("Traceback", process.stderr)
        results = json.loads(self.read("else where/results/results.json"))
        self.assertEqual([(test["name"], test["outcome"]) for test in results["tests"]], [("cuda: quick", "passed"), ("cuda: carried", "passed")])
        self.assertEqual(results["figures"], FIGURES["figures"], "the first build's")
        self.assertEqual(results["machine"]["device"], "Double")
        self.assertTrue(results["notes"][0].startswith("2 more tests"), results["notes"])  # with faults, and scripted
        for library in ("standard/libstdc++.so.6", "standard/libgcc_s.so.1", "libnvbench.so"):
            self.assertTrue(os.path.isfile(self.path("else where/lib", library)))

    def test_benchmarks_of_an_earlier_configuration_stay_out(self):
        build = self.build("build", [], ["bench/nvbench/bench_norm"], "OFF")
        self.assertEqual(json.loads(self.measure("manifest", build).stdout)["programs"], {})

    def test_the_commit_is_named(self):
        build = self.build("build", [])
        self.assertRegex(json.loads(self.measure("manifest", build).stdout)["commit"], r"^([0-9a-f]{40}(-dirty)?|unknown)$")
        os.makedirs(self.path("tools"))
        process = subprocess.run([sys.executable, os.path.join(BENCH, "measure.py"), "manifest", build], capture_output=True, text=True, check=True,
                                 env={"PATH": self.path("tools")})  # without git
        self.assertEqual(json.loads(process.stdout)["commit"], "unknown")

    def test_what_cannot_be_packed_is_refused(self):
        program = self.script("build/test_cuda", "exit 0")
        full = self.path("full")
        self.script("full/run", "exit 0")
        for tests, folder, text in (
                ([("a: one", [program, self.place], "LABELS quick")], "folder", f"needs the folder {self.place}"),
                ([("a: one", [self.path("missing")], "LABELS quick")], "folder", self.path("missing") + " is not built"),
                ([("test_laws_cuda_NOT_BUILT", [program], "LABELS quick")], "folder", "test_laws_cuda is not built"),
                ([], "full", f"{full} is not empty")):
            process = self.measure("pack", self.build("build", tests), self.path(folder))
            self.assertEqual(process.returncode, 1)
            self.assertIn(text, process.stderr)
            self.assertNotIn("Traceback", process.stderr)
            shutil.rmtree(self.path("folder"), ignore_errors=True)

    def test_two_files_of_one_name_are_refused(self):
        one, two = self.script("build/one/test_cuda", "exit 0"), self.script("build/two/test_cuda", "exit 1")
        build = self.build("build", [("a: one", [one], "LABELS quick"), ("a: two", [two], "LABELS quick")])
        process = self.measure("pack", build, self.path("folder"))
        self.assertEqual(process.returncode, 1)
        self.assertIn(one, process.stderr)
        self.assertIn(two, process.stderr)

    def test_without_a_gpu(self):
        self.script("none/nvidia-smi", "echo no devices; exit 9")
        folder = self.path("folder")
        self.measure("pack", self.build("build", []), folder)
        process = self.call(os.path.join(folder, "run"), SHARDOPT_GPU_LAUNCHER="", PATH=f"{self.path('none')}:{os.environ['PATH']}")
        self.assertEqual((process.returncode, process.stderr), (1, "run: no GPU answers (nvidia-smi -L)\n"))


class Peers(Folder):
    TORCH = """
import sys, types
class Tensor:
    def copy_(self, other): events.append("copy")
class Event:
    def __init__(self, enable_timing): assert enable_timing
    def record(self): self.at = len(events)
    def synchronize(self): pass
    def elapsed_time(self, other): return (other.at - self.at) / 1000  # a microsecond each
class AdamW:
    def __init__(self, parameters, fused): assert fused and parameters[0].grad
    def step(self): events.append("step"); events.append("step")
events = []
__version__ = "9.9"
def zeros(elements, device): assert device == "cuda"; return Tensor()
cuda = types.SimpleNamespace(is_available=lambda: AVAILABLE, Event=Event)
nn = types.SimpleNamespace(Parameter=lambda tensor: tensor)
optim = types.SimpleNamespace(AdamW=AdamW)
"""

    def peers(self, torch):
        with open(self.path("torch.py"), "w", encoding="utf-8") as file:
            file.write(torch)
        return self.call(sys.executable, os.path.join(BENCH, "peers.py"), "1000", PYTHONPATH=self.place)

    def test_figures(self):
        process = self.peers(self.TORCH.replace("AVAILABLE", "True"))
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertEqual(json.loads(process.stdout), {"elements": 1000, "torch": "9.9", "figures": [
            {"name": "PyTorch: copy", "bytes_per_element": 8, "gigabytes_per_second": 8.0, "of_copy": 1.0},  # 8000 bytes a microsecond
            {"name": "PyTorch: fused AdamW fp32", "bytes_per_element": 28, "gigabytes_per_second": 14.0, "of_copy": 1.75}]})

    def test_without_pytorch(self):
        for torch, reason in (("raise ImportError('no such module')", "no such module"), ("raise OSError('libcudart')", "libcudart"),
                              (self.TORCH.replace("AVAILABLE", "False"), "finds no GPU")):
            process = self.peers(torch)
            self.assertEqual(process.returncode, 77, process.stderr)
            self.assertIn(reason, process.stdout)


if __name__ == "__main__":
    unittest.main()
