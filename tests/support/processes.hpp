// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace support {

/// How a process ended.
struct ProcessEnd {
  int exit_code = -1;  ///< -1: by a signal
  int signal = 0;
  std::string text;    ///< what the body returned, or the text of its exception after "exception: "
  double seconds = 0;  ///< from the start of all to its end
};

/// Runs `body(rank)` in one process a rank and waits for all; those that run longer than `limit` are killed.
/// The calling process must not have used CUDA: what is forked cannot use it then.
inline std::vector<ProcessEnd> run_processes(int world, const std::function<std::string(int)>& body,
                                             std::chrono::seconds limit) {
  struct Child {
    pid_t pid;
    int pipe;
    bool ended;
  };
  const auto start = std::chrono::steady_clock::now();
  std::vector<Child> children;
  for (int rank = 0; rank < world; ++rank) {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("pipe failed");
    const pid_t pid = fork();
    if (pid < 0) throw std::runtime_error("fork failed");
    if (pid == 0) {
      close(ends[0]);
      std::string text;
      int code = 0;
      try {
        text = body(rank);
      } catch (const std::exception& error) {
        text = std::string("exception: ") + error.what();
        code = 1;
      }
      const bool written = write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size());
      std::_Exit(written ? code : 2);
    }
    close(ends[1]);
    children.push_back({pid, ends[0], false});
  }
  std::vector<ProcessEnd> result(children.size());
  for (std::size_t left = children.size(); left > 0;) {
    const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start);
    for (std::size_t rank = 0; rank < children.size(); ++rank) {
      Child& child = children[rank];
      if (child.ended) continue;
      if (seconds > limit) kill(child.pid, SIGKILL);
      int status = 0;
      if (waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
      char buffer[4096];
      for (ssize_t got = 0; (got = read(child.pipe, buffer, sizeof buffer)) > 0;) {
        result[rank].text.append(buffer, static_cast<std::size_t>(got));
      }
      close(child.pipe);
      if (WIFEXITED(status)) result[rank].exit_code = WEXITSTATUS(status);
      if (WIFSIGNALED(status)) result[rank].signal = WTERMSIG(status);
      result[rank].seconds = seconds.count();
      child.ended = true;
      --left;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return result;
}

}  // namespace support
