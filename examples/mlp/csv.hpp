// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "options.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

namespace mlp {

/// The file of --csv: one row a step. Without a name it is off.
class Csv {
 public:
  /// @throws UsageError if the file cannot be written
  explicit Csv(const std::string& path) : path_(path) {
    if (path.empty()) return;
    file_.reset(std::fopen(path.c_str(), "w"));
    if (file_ == nullptr) throw UsageError("--csv: cannot write '" + path + "': " + std::strerror(errno));
    std::fprintf(file_.get(), "iteration,loss,lr,norm\n");
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
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace mlp
