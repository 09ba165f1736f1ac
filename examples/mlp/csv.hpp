// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "options.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>

namespace mlp {

/// The file of --csv: one row a step. Without a name it is off.
class Csv {
 public:
  /// @param keep  whether rows of a run before stay: for go_on_after()
  /// @throws UsageError if the file cannot be written
  Csv(const std::string& path, bool keep) : path_(path) {
    if (path.empty()) return;
    if (keep) file_.reset(std::fopen(path.c_str(), "r+"));
    if (file_ == nullptr) file_.reset(std::fopen(path.c_str(), "w"));
    if (file_ == nullptr) throw UsageError("--csv: cannot write '" + path + "': " + std::strerror(errno));
    if (!keep) std::fprintf(file_.get(), "%s\n", head);
  }

  /// Leaves of a table that was kept the rows up to this iteration: those that follow are made again.
  /// @throws std::runtime_error if that fails
  void go_on_after(int iteration) {
    if (!on()) return;
    std::ifstream table(path_);
    long stays = 0;
    for (std::string line; std::getline(table, line) && !table.eof();) {
      if (stays == 0 ? line != head : std::atoi(line.c_str()) > iteration) break;
      stays += static_cast<long>(line.size()) + 1;
    }
    if (ftruncate(fileno(file_.get()), stays) != 0 || std::fseek(file_.get(), stays, SEEK_SET) != 0)
      throw std::runtime_error("cannot write '" + path_ + "': " + std::strerror(errno));
    if (stays == 0) std::fprintf(file_.get(), "%s\n", head);
  }

  [[nodiscard]] bool on() const { return file_ != nullptr; }

  void row(int iteration, double loss, double lr, double norm) {
    if (on()) std::fprintf(file_.get(), "%d,%.9g,%.9g,%.9g\n", iteration, loss, lr, norm);
  }

  /// Writes what is buffered.
  /// @throws std::runtime_error if that fails (a full disk)
  void flush() {
    if (on() && (std::fflush(file_.get()) != 0 || std::ferror(file_.get()) != 0)) {
      throw std::runtime_error("cannot write '" + path_ + "': " + std::strerror(errno));
    }
  }

 private:
  static constexpr const char* head = "iteration,loss,lr,norm";

  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace mlp
