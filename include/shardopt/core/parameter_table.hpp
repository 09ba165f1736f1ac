// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/error.hpp>
#include <shardopt/core/range.hpp>
#include <shardopt/core/shape.hpp>

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace shardopt::inline v0 {

/// Names a parameter of one table: its place in it.
struct ParameterId {
  /// Position in the table.
  std::uint32_t index = 0;
  /// By position.
  friend bool operator==(ParameterId, ParameterId) = default;
};

/// One parameter as the engine describes it.
struct ParameterInfo {
  std::string name;                  ///< unique in the table
  Shape shape = {};                  ///< {} is a scalar; a zero dimension is legal
  std::optional<Count> offset = {};  ///< elements from the start of both flat buffers
  void* parameter = nullptr;         ///< or, without an offset: its own memory …
  void* gradient = nullptr;          ///< … and its gradient's
  std::string group = "default";     ///< parameters of a group share hyper-parameters
  bool frozen = false;               ///< no state, no traffic, never written
  /// Second name of an earlier parameter of the same shape (tied weights): group and frozen are that one's
  /// and need not be given.
  std::string alias_of = {};
};

/// The engine's parameters in their canonical order: name, shape, place and group of each. The same on every
/// rank.
///
/// *Flat index*: counts the elements of trainable parameters in table order without gaps; frozen parameters
/// and aliases have none. The engine's packing is taken as it is: any offsets, gaps and sizes.
class ParameterTable {
 public:
  /// A parameter of the table, resolved.
  struct Entry {
    /// As given.
    std::string name = {};
    /// As given.
    Shape shape = {};
    /// Number of elements.
    std::int64_t numel = 0;
    std::int64_t offset = 0;  ///< in flat buffers; 0 if it has memory of its own
    /// Its own memory, if it has.
    void* parameter = nullptr;
    /// Its gradient's own memory, if it has.
    void* gradient = nullptr;
    /// Name of its group.
    std::string group = {};
    /// No state, no traffic, never written.
    bool frozen = false;
    /// What it is a second name of, if it is.
    std::optional<ParameterId> alias_of = {};
    Range flat = {};  ///< empty for frozen parameters and aliases
  };

  /// Appends a parameter.
  /// @throws std::invalid_argument naming the parameter: an empty or repeated name, a shape whose product
  /// overflows, a place
  ///   that overlaps another parameter's, a place missing or given twice, an alias of an unknown parameter,
  ///   another shape or another group, or one that is frozen while the other is not
  ParameterId add(const ParameterInfo& info) {
    Entry entry = resolved(info);
    const ParameterId id{static_cast<std::uint32_t>(entries_.size())};
    if (!entry.alias_of && !entry.frozen) {
      entry.flat = {trainable_, trainable_ + entry.numel};
      trainable_ += entry.numel;
    }
    if (!entry.alias_of) separate_ = !info.offset.has_value();  // only now: what was refused decides nothing
    by_name_.emplace(entry.name, id);
    if (info.offset && entry.numel > 0 && !entry.alias_of) by_offset_.emplace(entry.offset, id);
    entries_.push_back(std::move(entry));
    return id;
  }

  /// All parameters in table order.
  [[nodiscard]] std::span<const Entry> entries() const noexcept { return entries_; }
  /// One parameter. @throws std::out_of_range if the table has no such id
  [[nodiscard]] const Entry& operator[](ParameterId id) const { return entries_.at(id.index); }
  /// Number of parameters, frozen ones and aliases included.
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }

  /// Elements of the flat index.
  [[nodiscard]] std::int64_t trainable_elements() const noexcept { return trainable_; }

  /// Whether parameters have memory of their own (and not offsets in two flat buffers).
  [[nodiscard]] bool separate() const noexcept { return separate_.value_or(false); }

  /// @throws std::invalid_argument if no parameter has that name
  [[nodiscard]] ParameterId id_of(std::string_view name) const {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) fail(name, "is not in the table");
    return found->second;
  }

  /// The parameter that holds the elements: itself, or what it is an alias of.
  /// @throws std::invalid_argument if the table has no such id
  [[nodiscard]] ParameterId storage_of(ParameterId id) const {
    if (id.index >= entries_.size()) {
      throw std::invalid_argument("shardopt: no parameter has the id " + std::to_string(id.index) +
                                  "; the table holds " + std::to_string(entries_.size()));
    }
    return entries_[id.index].alias_of.value_or(id);
  }

 private:
  [[noreturn]] static void fail(std::string_view name, const std::string& what) {
    throw std::invalid_argument("shardopt: parameter " + detail::in_quotes(name) + " " + what);
  }

  [[nodiscard]] Entry resolved(const ParameterInfo& info) const {
    constexpr std::int64_t limit = (std::numeric_limits<std::int64_t>::max)();
    if (info.name.empty()) throw std::invalid_argument("shardopt: a parameter needs a name");
    if (by_name_.contains(info.name)) fail(info.name, "is in the table already");
    Entry entry{.name = info.name, .shape = info.shape, .group = info.group, .frozen = info.frozen};
    try {
      entry.numel = info.shape.numel();
    } catch (const std::invalid_argument& error) {
      fail(info.name, std::string("is too large: ") + error.what());
    }
    if (!info.alias_of.empty()) return resolved_alias(info, std::move(entry));
    const bool separate = !info.offset.has_value();
    if (!separate && (info.parameter != nullptr || info.gradient != nullptr)) {
      fail(info.name, "has an offset and pointers; give either");
    }
    if (separate && entry.numel > 0 &&
        (info.parameter == nullptr || (info.gradient == nullptr && !info.frozen))) {
      fail(info.name, "has no place: give .offset, or .parameter and .gradient");
    }
    if (separate_ && *separate_ != separate) {
      fail(info.name, "mixes offsets and pointers in one table; use one of them for all parameters");
    }
    entry.parameter = info.parameter;
    entry.gradient = info.gradient;
    if (!separate) entry.offset = info.offset->value();
    if (entry.offset > limit - entry.numel || trainable_ > limit - entry.numel) {
      fail(info.name, "ends beyond 2^63-1 elements");
    }
    if (!separate) refuse_overlap(entry);
    return entry;
  }

  [[nodiscard]] Entry resolved_alias(const ParameterInfo& info, Entry entry) const {
    if (info.offset || info.parameter != nullptr || info.gradient != nullptr) {
      fail(info.name, "is an alias and needs no place of its own");
    }
    const auto target = by_name_.find(info.alias_of);
    if (target == by_name_.end()) {
      fail(info.name, "is an alias of " + detail::in_quotes(info.alias_of) +
                          ", which is not in the table (add that first)");
    }
    entry.alias_of = storage_of(target->second);
    const Entry& storage = entries_[entry.alias_of->index];
    if (storage.shape != info.shape) {
      fail(info.name, "has shape " + info.shape.text() + " but is an alias of " +
                          detail::in_quotes(info.alias_of) + " with shape " + storage.shape.text());
    }
    if (info.group != ParameterInfo{}.group && info.group != storage.group) {
      fail(info.name, "is given group " + detail::in_quotes(info.group) + " but is an alias of " +
                          detail::in_quotes(info.alias_of) + ", which is in group " +
                          detail::in_quotes(storage.group) + "; leave the group out");
    }
    if (info.frozen && !storage.frozen) {
      fail(info.name, "is given as frozen but is an alias of " + detail::in_quotes(info.alias_of) +
                          ", which is not; freeze that");
    }
    entry.group = storage.group;
    entry.frozen = storage.frozen;
    entry.offset = storage.offset;
    entry.parameter = storage.parameter;
    entry.gradient = storage.gradient;
    return entry;
  }

  void refuse_overlap(const Entry& entry) const {
    if (entry.numel == 0) return;
    const auto next = by_offset_.lower_bound(entry.offset);
    const auto report = [&](const Entry& other) {
      fail(entry.name,
           "at elements " + std::to_string(entry.offset) + ".." + std::to_string(entry.offset + entry.numel) +
               " overlaps " + detail::in_quotes(other.name) + " at " + std::to_string(other.offset) + ".." +
               std::to_string(other.offset + other.numel) + "; tied weights are added with .alias_of");
    };
    if (next != by_offset_.end()) {
      const Entry& other = entries_[next->second.index];
      if (other.offset < entry.offset + entry.numel) report(other);
    }
    if (next != by_offset_.begin()) {
      const Entry& other = entries_[std::prev(next)->second.index];
      if (other.offset + other.numel > entry.offset) report(other);
    }
  }

  std::vector<Entry> entries_;
  std::map<std::string, ParameterId, std::less<>> by_name_;
  std::map<std::int64_t, ParameterId> by_offset_;
  std::optional<bool> separate_;
  std::int64_t trainable_ = 0;
};

}  // namespace shardopt::inline v0
