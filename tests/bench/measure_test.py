#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/measure.py and the folder that it packs, with shell scripts in the place of programs for the GPU.

    measure_test.py [unittest arguments]
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
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


def nvbench_double(*states):
    """Writes what nvbench would into the file after --json, and its arguments beside it."""
    content = json.dumps({"devices": [], "benchmarks": [{"name": "update", "index": 0, "axes": None, "states": list(states)}]})
    return f'''while [ "$1" != --json ]; do shift; done; cat >"$2" <<'END'\n{content}\nEND'''


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

    def call(self, *command, **environment):
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={**self.environment, **environment})

    def measure(self, *arguments):
        return self.call(sys.executable, os.path.join(BENCH, "measure.py"), *arguments)


class Run(Folder):
    def run_with(self, tests=(), *arguments, **programs):
        """What `measure.py run` makes of tests (name and script) and programs (scripts): the process, results.json, results.md."""
        manifest = {"commit": "0123456789abcdef", "programs": {}, "tests": []}
        for name, text in programs.items():
            manifest["programs"][name] = os.path.relpath(self.script(f"bin/{name}", text), self.place)
        for name, text in tests:
            self.script(f"bin/test{len(manifest['tests'])}", text)
            manifest["tests"].append({"name": name, "command": [f"bin/test{len(manifest['tests'])}"], "skip_code": 4})
        with open(self.path("manifest.json"), "w", encoding="utf-8") as file:
            json.dump(manifest, file)
        process = self.measure("run", self.place, self.path("results"), *arguments)
        with open(self.path("results/results.json"), encoding="utf-8") as file:
            results = json.load(file)
        with open(self.path("results/results.md"), encoding="utf-8") as file:
            text = file.read()
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
            ("a: skips", "echo 'explicitly with message:'; echo '  needs 2 GPUs'; exit 4"),
            ("a: has no nccl", "echo 'x: error while loading shared libraries: libnccl.so.2: no such file'; exit 127")])
        self.assertEqual(process.returncode, 1)
        by_name = {test["name"]: test for test in results["tests"]}
        self.assertEqual({name: test["outcome"] for name, test in by_name.items()}, {
            "a: passes": "passed", "a: fails": "failed", "a: is killed": "failed", "a: skips": "skipped", "a: has no nccl": "skipped"})
        self.assertIn("seven is not eight", by_name["a: fails"]["output"])
        self.assertEqual(by_name["a: skips"]["reason"], "needs 2 GPUs")
        self.assertIn("Tests: 2 failed, 1 passed, 2 skipped.", text)
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
        self.assertEqual(results["tests"][0]["reason"], "ran out of time")
        self.assertIn("takes 1 ms", self.notes(results, "overlap")[0])
        self.assertLess(results["seconds"], 20)
        with open(self.path("child"), encoding="utf-8") as file:
            child = file.read().strip()
        try:
            with open(f"/proc/{child}/stat", encoding="utf-8") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except OSError:
            state = "gone"
        self.assertIn(state, ("gone", "Z"), "what the test had started still runs")

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
        self.assertIn("| update: AdamW, 1048576 | 12.5 | 150.0 | 0.750 |", text)
        self.assertEqual(self.notes(results, "update"), ["update elements=2^28: not enough memory"])

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

    def test_what_was_not_built_is_said(self):
        process, results, _ = self.run_with()
        self.assertEqual(process.returncode, 0)
        self.assertEqual(self.notes(results, "peers"), ["peers: skipped: no PyTorch here"])
        for name in ("figures", "tests", "bench_update", "bench_norm", "bench_step", "overlap"):
            self.assertEqual(self.notes(results, name), [f"{name}: not built"])


class Pack(Folder):
    def build(self, name, tests, programs=("bench/figures",)):
        """A build folder as CMake leaves it."""
        where = self.path(name)
        os.makedirs(where, exist_ok=True)
        on_gpu = self.script("on_gpu.sh", 'exec "$@"')
        with open(os.path.join(where, "CTestTestfile.cmake"), "w", encoding="utf-8") as file:
            for test, command, properties in tests:
                words = " ".join(f'"{word}"' for word in command)
                file.write(f'add_test("{test}" "{on_gpu}" {words})\nset_tests_properties("{test}" PROPERTIES {properties})\n')
        with open(os.path.join(where, "CMakeCache.txt"), "w", encoding="utf-8") as file:
            file.write(f"CMAKE_CTEST_COMMAND:INTERNAL={shutil.which('ctest')}\n")
        for program in programs:
            self.script(f"{name}/{program}", GOOD_FIGURES)
        return where

    def test_a_folder_that_runs_by_itself(self):
        golden = self.path("golden.txt")
        with open(golden, "w", encoding="utf-8") as file:
            file.write("42\n")
        program = self.script("build/tests/test_cuda", '[ "$1" = case ] && [ "$(cat "$2")" = 42 ] && cd "$(dirname "$0")" && exec ./helper')
        helper = self.script("build/tests/helper", "exit 0")
        build = self.build("build", [
            ("cuda: quick", [program, "case", golden], "LABELS quick"), ("cuda: carried", [helper], "LABELS quick"),
            ("cuda: slow", [program], "LABELS full"), ("cuda: faults", [program], 'LABELS quick ENVIRONMENT "SHARDOPT_TEST_FAULTS=x"')])
        bench = self.build("bench", [], ["bench/figures", "bench/overlap"])
        folder = self.path("folder")
        process = self.measure("pack", build, bench, folder)
        self.assertEqual(process.returncode, 0, process.stderr)
        for name in ("build", "bench", "golden.txt", "on_gpu.sh"):  # all that the folder came from is gone, and it is elsewhere
            (shutil.rmtree if os.path.isdir(self.path(name)) else os.remove)(self.path(name))
        os.rename(folder, self.path("elsewhere"))
        process = self.call(self.path("elsewhere/run"), self.path("results"), "--elements", "1024", "--tests", "cuda")
        self.assertEqual(process.returncode, 0, process.stdout + process.stderr)
        with open(self.path("results/results.json"), encoding="utf-8") as file:
            results = json.load(file)
        self.assertEqual([(test["name"], test["outcome"]) for test in results["tests"]], [("cuda: quick", "passed"), ("cuda: carried", "passed")])
        self.assertEqual(results["figures"], FIGURES["figures"])
        self.assertEqual(results["machine"]["device"], "Double")
        for library in ("libstdc++.so.6", "libgcc_s.so.1"):
            self.assertTrue(os.path.isfile(self.path("elsewhere/lib/standard", library)))

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


if __name__ == "__main__":
    unittest.main()
