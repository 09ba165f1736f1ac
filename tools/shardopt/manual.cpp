// SPDX-License-Identifier: Apache-2.0
#include "manual.hpp"

#include <cstddef>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace tool {

namespace {

constexpr std::size_t width = 80;

/// Breaks a text into lines, indented.
std::string paragraph(const std::string& text, std::size_t indent) {
  std::istringstream words(text);
  std::string result;
  std::string line(indent, ' ');
  bool empty = true;
  for (std::string word; words >> word;) {
    if (!empty && line.size() + 1 + word.size() > width) {
      result += line + "\n";
      line.assign(indent, ' ');
      empty = true;
    }
    line += (empty ? "" : " ") + word;
    empty = false;
  }
  return result + line + "\n";
}

/// "-h, --help", "--world M"
std::string names_of(const CLI::Option& option) {
  std::string text;
  if (option.get_positional()) return option.get_name(true);
  for (const std::string& name : option.get_snames()) text += (text.empty() ? "-" : ", -") + name;
  for (const std::string& name : option.get_lnames()) text += (text.empty() ? "--" : ", --") + name;
  return option.get_type_name().empty() ? text : text + " " + option.get_type_name();
}

/// Writes one help text as a man page is laid out.
class ManualFormatter final : public CLI::Formatter {
 public:
  explicit ManualFormatter(Manual manual) : manual_(std::move(manual)) {}

  std::string make_help(const CLI::App* app, std::string, CLI::AppFormatMode) const override {
    std::string text =
        "NAME\n" +
        paragraph("shardopt" + (manual_.name.empty() ? "" : "-" + manual_.name) + " - " + manual_.summary, 4);
    text += "\nSYNOPSIS\n";
    for (const std::string& line : manual_.synopsis) text += "    shardopt " + line + "\n";
    text += "\nDESCRIPTION\n";
    for (std::size_t k = 0; k < manual_.description.size(); ++k)
      text += (k > 0 ? "\n" : "") + paragraph(manual_.description[k], 4);
    text += commands(*app) + options(*app);
    if (!manual_.exit_status.empty()) text += pairs("EXIT STATUS", manual_.exit_status);
    if (!manual_.examples.empty()) text += pairs("EXAMPLES", manual_.examples);
    return text;
  }

 private:
  static std::string pairs(const std::string& title,
                           const std::vector<std::pair<std::string, std::string>>& entries) {
    std::string text = "\n" + title + "\n";
    for (const auto& [what, meaning] : entries) text += "    " + what + "\n" + paragraph(meaning, 8);
    return text;
  }

  static std::string commands(const CLI::App& app) {
    std::vector<std::pair<std::string, std::string>> entries;
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
      entries.emplace_back(command->get_name(), command->get_description());
    return entries.empty() ? "" : pairs("COMMANDS", entries);
  }

  static std::string options(const CLI::App& app) {
    std::vector<std::pair<std::string, std::string>> entries;
    for (const bool positional : {true, false}) {
      for (const CLI::Option* option : app.get_options()) {
        if (option->get_positional() != positional) continue;
        std::string meaning = option->get_description();
        if (!option->get_default_str().empty()) meaning += " Default: " + option->get_default_str() + ".";
        entries.emplace_back(names_of(*option), meaning);
      }
    }
    return pairs("OPTIONS", entries);
  }

  Manual manual_;
};

}  // namespace

void set_manual(CLI::App& app, const Manual& manual) {
  app.formatter(std::make_shared<ManualFormatter>(manual));
  app.set_help_flag("-h,--help", "Shows this page.");
}

}  // namespace tool
