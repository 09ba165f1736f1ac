// SPDX-License-Identifier: Apache-2.0
// Processes that are killed while they save, and such that may not write more, on the real file system.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/checkpoint_engine.hpp>
#include <support/scratch_files.hpp>

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using namespace test;

namespace {

/// A process of the program `saver`.
class Saver {
 public:
  explicit Saver(std::vector<std::string> arguments) {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("pipe failed");
    arguments.insert(arguments.begin(), SHARDOPT_SAVER);
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    pid_ = fork();
    if (pid_ < 0) throw std::runtime_error("fork failed");
    if (pid_ == 0) {
      dup2(ends[1], STDOUT_FILENO);
      close(ends[0]);
      close(ends[1]);
      execv(pointers[0], pointers.data());
      std::_Exit(127);
    }
    close(ends[1]);
    pipe_ = ends[0];
  }
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;
  ~Saver() {
    if (pid_ > 0) static_cast<void>(end(true));
    close(pipe_);
  }

  /// Waits for the first output.
  void await_output() {
    char letter = 0;
    if (read(pipe_, &letter, 1) == 1) text_ += letter;
  }

  /// Kills it, or waits for its end. @return the signal or exit code that it ended with
  int end(bool kill_it) {
    if (kill_it) kill(pid_, SIGKILL);
    char buffer[4096];
    for (ssize_t got = 0; (got = read(pipe_, buffer, sizeof buffer)) > 0;)
      text_.append(buffer, static_cast<std::size_t>(got));
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
  }

  [[nodiscard]] const std::string& text() const noexcept { return text_; }

 private:
  pid_t pid_ = -1;
  int pipe_ = -1;
  std::string text_;
};

/// What is wrong with a directory: loads on two ranks, trains one step, saves, looks.
/// @param least  an iteration that was saved for certain
[[nodiscard]] std::string fault_of(const std::filesystem::path& directory, std::int64_t least,
                                   std::int64_t keep, std::vector<Snapshot>& plain) {
  const auto results = on_ranks(2, [&](HostThreads comm) -> std::string {
    AdamEngine engine(std::move(comm));
    std::string failure;
    std::int64_t loaded = 0;
    failure = message_of([&] { loaded = ckpt::load(engine.optimizer, directory, {}, {}).iteration; });
    const bool none = failure.find("there is no complete checkpoint in") != std::string::npos;
    if (!failure.empty() && !(none && least == 0)) return failure;
    if (loaded < least)
      return std::to_string(loaded) + " was loaded after " + std::to_string(least) + " was saved";
    const Snapshot now = engine.snapshot();
    if (engine.optimizer.rank() == 0) {
      if (static_cast<std::size_t>(loaded) >= plain.size()) plain = plain_run(loaded + 50);
      if (now != plain[static_cast<std::size_t>(loaded)])
        return "what was loaded is not " + std::to_string(loaded);
    }
    engine.train(1);
    failure = message_of([&] { ckpt::save(engine.optimizer, directory, {.keep = keep}, {}); });
    if (!failure.empty()) return failure;
    static_cast<void>(engine.optimizer.exchange(""));
    if (engine.optimizer.rank() != 0) return {};
    std::int64_t complete = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      if (!entry.path().filename().string().starts_with("generation-"))
        return entry.path().string() + " is left";
      ++complete;
      const auto problems = ckpt::verify(ckpt::Checkpoint(entry.path()));
      if (!problems.empty()) return problems.front();
    }
    return keep > 0 && complete > keep ? "too many are kept" : "";
  });
  for (const std::string& result : results) {
    if (!result.empty()) return result;
  }
  return {};
}

/// Kills savers at random instants, each continuing where the one before stood.
[[nodiscard]] std::string faults_of_kills(int kills, std::int64_t keep, std::uint64_t seed) {
  const ScratchFolder folder;
  std::mt19937_64 random(seed);
  std::vector<Snapshot> plain = plain_run(100);
  std::int64_t saved = 0;
  for (int k = 0; k < kills; ++k) {
    Saver saver({folder.path().string(), std::to_string(keep)});
    // At first it starts and loads: some die there, most a little behind their first save.
    if (k % 8 != 0) saver.await_output();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
    if (saver.end(true) != SIGKILL) return "the saver has ended by itself: " + saver.text();
    std::istringstream lines(saver.text().substr(0, saver.text().rfind('\n') + 1));
    for (std::int64_t line = 0; lines >> line;) saved = line;
    const std::string fault = fault_of(folder.path(), saved, keep, plain);
    if (!fault.empty()) return "kill " + std::to_string(k) + ": " + fault;
    saved += 1;
  }
  return {};
}

}  // namespace

TEST_CASE("A saving process that is killed at random instants leaves a whole checkpoint",
          "[checkpoint][host][law8][B082]") {
  const std::int64_t keep = GENERATE(1, 2);
  CAPTURE(keep);
  CHECK(faults_of_kills(20, keep, 1) == "");
}

TEST_CASE("A saving process that is killed at two hundred random instants leaves a whole checkpoint",
          "[checkpoint][host][law8][B082][full]") {
  CHECK(faults_of_kills(200, 2, 2) == "");
}

TEST_CASE("A process that may not write more bytes keeps the old checkpoint, and every rank says so",
          "[checkpoint][host][B082]") {
  const ScratchFolder folder;
  std::vector<Snapshot> plain = plain_run(60);
  static_cast<void>(on_ranks(3, [&](HostThreads comm) {
    AdamEngine engine(std::move(comm));
    engine.train(10);
    ckpt::save(engine.optimizer, folder.path(), {}, {});
    return 0;
  }));
  std::int64_t all = 0;
  for (const auto& entry : std::filesystem::directory_iterator(ckpt::newest(folder.path())))
    all = std::max(all, static_cast<std::int64_t>(entry.file_size()));
  std::int64_t last = 10;
  for (const std::int64_t limit :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{63}, std::int64_t{64}, all / 2, all - 1}) {
    CAPTURE(limit, all);
    Saver saver({folder.path().string(), "0", std::to_string(limit)});
    REQUIRE(saver.end(false) == 0);
    std::istringstream lines(saver.text());
    int ranks = 0;
    for (std::string line; std::getline(lines, line); ++ranks) {
      CAPTURE(line);
      CHECK(line.find("rank 0") != std::string::npos);
      CHECK(line.find("File too large") != std::string::npos);
    }
    CHECK(ranks == 3);
    CHECK(ckpt::generations(folder.path(), ckpt::PosixFiles::instance()).back().iteration == last);
    CHECK(fault_of(folder.path(), last, 0, plain) == "");
    last += 1;
  }
}
