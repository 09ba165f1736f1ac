// SPDX-License-Identifier: Apache-2.0
#include <shardopt/rules/rule.hpp>
//
#include <shardopt/rules/adamw.hpp>
#include <shardopt/rules/sgd.hpp>

#include <array>
#include <catch2/catch_test_macros.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

#include "drive.hpp"

namespace so = shardopt;

namespace {

/// The least a rule can be: no state, no hyper-parameter, no name.
struct Minimal {
  template <class V>
  struct State {};
  struct Constants {};
  SHARDOPT_HD Constants constants(so::StepScalars) const { return {}; }
  template <class V>
  SHARDOPT_RULE static V update(Constants, V param, V grad, State<V>&) {
    return so::math::sub(param, grad);
  }
};
static_assert(so::OptimizerRule<Minimal>);
static_assert(so::state_count<Minimal> == 0);
static_assert(so::rule_name<Minimal> == "custom");

/// A user's rule, as short as one can be.
struct SignSgd {
  float lr = 1e-3f;
  template <class V>
  struct State {
    V momentum;
  };
  struct Constants {
    float lr;
  };
  SHARDOPT_HD Constants constants(so::StepScalars s) const { return {so::math::mul(lr, s.lr_factor)}; }
  template <class V>
  SHARDOPT_RULE static V update(Constants c, V param, V grad, State<V>& s) {
    s.momentum = so::math::fma(0.9f, s.momentum, grad);
    return so::math::sub(param, so::math::copysign(V(c.lr), s.momentum));
  }
};
static_assert(so::OptimizerRule<SignSgd>);
static_assert(so::state_count<SignSgd> == 1);
static_assert(so::state_names<SignSgd>[0] == "state_0");

// Near misses: each differs from Minimal or SignSgd in one thing.

struct NoConstants {
  template <class V>
  struct State {};
  struct Constants {};
  template <class V>
  SHARDOPT_RULE static V update(Constants, V param, V, State<V>&) {
    return param;
  }
};
struct ConstantsNotConst {
  template <class V>
  struct State {};
  struct Constants {};
  Constants constants(so::StepScalars) { return {}; }
  template <class V>
  SHARDOPT_RULE static V update(Constants, V param, V, State<V>&) {
    return param;
  }
};
struct WrongConstants {
  template <class V>
  struct State {};
  struct Constants {};
  float constants(so::StepScalars) const { return 1.0f; }
  template <class V>
  SHARDOPT_RULE static V update(Constants, V param, V, State<V>&) {
    return param;
  }
};
struct FatConstants {
  template <class V>
  struct State {};
  struct Constants {
    std::string text;
  };
  Constants constants(so::StepScalars) const { return {}; }
  template <class V>
  static V update(const Constants&, V param, V, State<V>&) {
    return param;
  }
};
struct NoState {
  struct Constants {};
  Constants constants(so::StepScalars) const { return {}; }
  template <class V>
  SHARDOPT_RULE static V update(Constants, V param, V) {
    return param;
  }
};
struct StateWithCounter {
  template <class V>
  struct State {
    V momentum;
    int count;
  };
  struct Constants {};
  Constants constants(so::StepScalars) const { return {}; }
  template <class V>
  SHARDOPT_RULE static V update(Constants, V param, V, State<V>&) {
    return param;
  }
};
struct StateWithArray {
  template <class V>
  struct State {
    V moments[2];
  };
  struct Constants {};
  Constants constants(so::StepScalars) const { return {}; }
  template <class V>
  SHARDOPT_RULE static V update(Constants, V param, V, State<V>&) {
    return param;
  }
};
struct StateOfFloats {  // floats where packs are asked for
  template <class V>
  struct State {
    float momentum;
  };
  struct Constants {};
  Constants constants(so::StepScalars) const { return {}; }
  template <class V>
  SHARDOPT_RULE static V update(Constants, V param, V, State<V>&) {
    return param;
  }
};
struct UpdateGivesNothing {
  template <class V>
  struct State {};
  struct Constants {};
  Constants constants(so::StepScalars) const { return {}; }
  template <class V>
  SHARDOPT_RULE static void update(Constants, V, V, State<V>&) {}
};
struct UpdateInDouble {
  template <class V>
  struct State {};
  struct Constants {};
  Constants constants(so::StepScalars) const { return {}; }
  template <class V>
  static double update(Constants, V, V, State<V>&) {
    return 0.0;
  }
};
struct UpdateForFloatsOnly {
  template <class V>
  struct State {};
  struct Constants {};
  Constants constants(so::StepScalars) const { return {}; }
  template <class V>
  requires(sizeof(V) == sizeof(float)) SHARDOPT_RULE static V update(Constants, V param, V, State<V>&) {
    return param;
  }
};
struct UpdateNotStatic {
  template <class V>
  struct State {};
  struct Constants {};
  Constants constants(so::StepScalars) const { return {}; }
  template <class V>
  SHARDOPT_HD_INLINE V update(Constants, V param, V, State<V>&) {
    return param;
  }
};
struct NamesOfAnotherState {
  template <class V>
  struct State {
    V momentum;
  };
  static constexpr std::array<std::string_view, 2> state_names{"exp_avg", "exp_avg_sq"};
  struct Constants {};
  Constants constants(so::StepScalars) const { return {}; }
  template <class V>
  SHARDOPT_RULE static V update(Constants, V param, V, State<V>&) {
    return param;
  }
};
template <int variant>
struct NamesThatClash {
  template <class V>
  struct State {
    V momentum;
    V second;
  };
  static constexpr std::array<std::string_view, 2> state_names{"momentum", variant == 0   ? "second"
                                                                           : variant == 1 ? "momentum"
                                                                           : variant == 2 ? "master"
                                                                                          : ""};
  struct Constants {};
  Constants constants(so::StepScalars) const { return {}; }
  template <class V>
  SHARDOPT_RULE static V update(Constants, V param, V, State<V>&) {
    return param;
  }
};
struct WithConstructor {
  WithConstructor() {}
  template <class V>
  struct State {};
  struct Constants {};
  Constants constants(so::StepScalars) const { return {}; }
  template <class V>
  SHARDOPT_RULE static V update(Constants, V param, V, State<V>&) {
    return param;
  }
};
struct WithVirtual {
  virtual ~WithVirtual() = default;
  template <class V>
  struct State {};
  struct Constants {};
  Constants constants(so::StepScalars) const { return {}; }
  template <class V>
  SHARDOPT_RULE static V update(Constants, V param, V, State<V>&) {
    return param;
  }
};
struct WithText {
  std::string text;
  template <class V>
  struct State {};
  struct Constants {};
  Constants constants(so::StepScalars) const { return {}; }
  template <class V>
  SHARDOPT_RULE static V update(Constants, V param, V, State<V>&) {
    return param;
  }
};
struct ThirteenHyperParameters {
  float a, b, c, d, e, f, g, h, i, j, k, l, m;
  template <class V>
  struct State {};
  struct Constants {};
  Constants constants(so::StepScalars) const { return {}; }
  template <class V>
  SHARDOPT_RULE static V update(Constants, V param, V, State<V>&) {
    return param;
  }
};

}  // namespace

TEST_CASE("Near misses are not rules", "[rules][host]") {
  STATIC_REQUIRE_FALSE(so::OptimizerRule<float>);
  STATIC_REQUIRE_FALSE(so::OptimizerRule<NoConstants>);
  STATIC_REQUIRE_FALSE(so::OptimizerRule<ConstantsNotConst>);
  STATIC_REQUIRE_FALSE(so::OptimizerRule<WrongConstants>);
  STATIC_REQUIRE_FALSE(so::OptimizerRule<FatConstants>);
  STATIC_REQUIRE_FALSE(so::OptimizerRule<NoState>);
  STATIC_REQUIRE_FALSE(so::OptimizerRule<StateWithCounter>);
  STATIC_REQUIRE_FALSE(so::OptimizerRule<StateWithArray>);
#if SHARDOPT_HOST_AVX2
  STATIC_REQUIRE_FALSE(so::OptimizerRule<StateOfFloats>);
  STATIC_REQUIRE_FALSE(so::OptimizerRule<UpdateForFloatsOnly>);
#endif
  STATIC_REQUIRE_FALSE(so::OptimizerRule<UpdateGivesNothing>);
  STATIC_REQUIRE_FALSE(so::OptimizerRule<UpdateInDouble>);
  STATIC_REQUIRE_FALSE(so::OptimizerRule<UpdateNotStatic>);
  STATIC_REQUIRE_FALSE(so::OptimizerRule<NamesOfAnotherState>);
  STATIC_REQUIRE(so::OptimizerRule<NamesThatClash<0>>);
  STATIC_REQUIRE_FALSE(so::OptimizerRule<NamesThatClash<1>>);  // two states of one name
  STATIC_REQUIRE_FALSE(so::OptimizerRule<NamesThatClash<2>>);  // the name of the library's own masters
  STATIC_REQUIRE_FALSE(so::OptimizerRule<NamesThatClash<3>>);  // a state without a name
  STATIC_REQUIRE_FALSE(so::OptimizerRule<WithConstructor>);
  STATIC_REQUIRE_FALSE(so::OptimizerRule<WithVirtual>);
  STATIC_REQUIRE_FALSE(so::OptimizerRule<WithText>);
  STATIC_REQUIRE_FALSE(so::OptimizerRule<ThirteenHyperParameters>);
}

TEST_CASE("A user's rule of ten lines gives the same bits by floats and by packs", "[rules][host]") {
  REQUIRE(drive::floats_and_packs_agree(SignSgd{}));
  REQUIRE(drive::floats_and_packs_agree(Minimal{}));
  REQUIRE(drive::one_element(SignSgd{.lr = 0.25f}, 1.0f, -3.0f).parameters[0] == 1.25f);
  REQUIRE_NOTHROW(so::validate(SignSgd{}));
  REQUIRE_FALSE(so::stateless(SignSgd{}));
  REQUIRE(so::stateless(Minimal{}));
}

TEST_CASE("A rule's own names lead", "[rules][host]") {
  STATIC_REQUIRE(so::rule_name<so::SGD> == "sgd");
  STATIC_REQUIRE(so::state_names<so::SGD>[0] == "momentum_buffer");
  STATIC_REQUIRE(so::rule_name<so::AdamW> == "adamw");
  STATIC_REQUIRE(so::rule_name<so::AdamWAmsgrad> == "adamw_amsgrad");
  STATIC_REQUIRE(so::state_names<so::AdamWAmsgrad>[2] == "max_exp_avg_sq");
}
