// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <shardopt/shardopt.hpp>
#include <string>
namespace mlp {
struct Report : shardopt::Observer { explicit Report(int){} void before(std::int64_t){} template<class...A> void after(A&&...){} std::string text(){return {};} };
}
