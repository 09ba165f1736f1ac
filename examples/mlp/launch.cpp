// SPDX-License-Identifier: Apache-2.0
#include "launch.hpp"

#include "run.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mlp {
namespace {

[[noreturn]] void fail(const char* call) {
  throw std::runtime_error(std::string("--processes: ") + call + ": " + std::strerror(errno));
}

/// A port of this machine that nobody listens at.
int free_port() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  const int descriptor = socket(AF_INET, SOCK_STREAM, 0);
  if (descriptor < 0) fail("socket");
  const bool bound = bind(descriptor, generic, size) == 0 && getsockname(descriptor, generic, &size) == 0;
  close(descriptor);
  if (!bound) fail("bind");
  return ntohs(address.sin_port);
}

/// This process's environment, with the place of a rank in it.
std::vector<std::string> environment_of(int rank, int world, int port) {
  const std::array<std::pair<std::string, std::string>, 5> place = {{{"RANK", std::to_string(rank)},
                                                                     {"WORLD_SIZE", std::to_string(world)},
                                                                     {"LOCAL_RANK", std::to_string(rank)},
                                                                     {"MASTER_ADDR", "127.0.0.1"},
                                                                     {"MASTER_PORT", std::to_string(port)}}};
  std::vector<std::string> result;
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string_view entry(*at);
    const std::string_view name = entry.substr(0, entry.find('='));
    if (std::none_of(place.begin(), place.end(), [&](const auto& ours) { return ours.first == name; }))
      result.emplace_back(entry);
  }
  for (const auto& [name, value] : place) result.push_back(name + "=" + value);
  return result;
}

/// The processes that were started; those that still run are killed at the end.
class Children {
 public:
  Children() = default;
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;
  ~Children() {
    for (const pid_t pid : running_) {
      if (pid != ended) kill(pid, SIGKILL);
    }
    for (const pid_t pid : running_) {
      while (pid != ended && waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
      }
    }
  }

  /// Starts the next rank.
  void start(std::vector<std::string> environment, char* const* arguments) {
    std::vector<char*> pointers;
    for (std::string& entry : environment) pointers.push_back(entry.data());
    pointers.push_back(nullptr);
    const pid_t parent = getpid();
    const pid_t pid = fork();
    if (pid < 0) fail("fork");
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() == parent) execve("/proc/self/exe", arguments, pointers.data());
      _exit(127);
    }
    running_.push_back(pid);
  }

  /// Waits until one has failed, or all have ended well. @return the exit code of the first that failed, or 0
  int wait() {
    for (std::size_t left = running_.size(); left > 0;) {
      int status = 0;
      const pid_t pid = waitpid(-1, &status, 0);
      if (pid < 0 && errno != EINTR) fail("waitpid");
      const auto found = std::find(running_.begin(), running_.end(), pid);
      if (pid < 0 || found == running_.end()) continue;
      *found = ended;
      --left;
      if (WIFSIGNALED(status)) {
        std::fprintf(stderr, "mlp: signal %d (%s) has killed rank %d; the other ranks are stopped\n",
                     WTERMSIG(status), strsignal(WTERMSIG(status)),
                     static_cast<int>(found - running_.begin()));
        return 128 + WTERMSIG(status);
      }
      if (WEXITSTATUS(status) != 0) return WEXITSTATUS(status);  // it has said why
    }
    return 0;
  }

 private:
  static constexpr pid_t ended = -1;
  std::vector<pid_t> running_;  ///< by rank
};

}  // namespace

int launch(int processes, char* const* arguments) {
  const int port = free_port();
  Children children;
  for (int rank = 0; rank < processes; ++rank) {
    children.start(environment_of(rank, processes, port), arguments);
  }
  return children.wait();
}

int gpus_of_children() {
  const pid_t pid = fork();
  if (pid < 0) fail("fork");
  if (pid == 0) _exit(std::min(gpus(), 255));
  int status = 0;
  while (waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) fail("waitpid");
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

}  // namespace mlp
